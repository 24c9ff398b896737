"""Signed reads over TLS: certificates are verified by the settings of the S3 client."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sa1b.storage.errors import StorageError, UnavailableError
from sa1b.storage.reader import Reader
from tests.storage.conftest import Store
from tests.storage.service import Service
from tests.storage.tls_proxy import certificate

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")


@pytest.fixture(scope="module")
def secured(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A certificate, and the options to read over the TLS that it secures."""
    made, key = certificate(tmp_path_factory.mktemp("tls"))
    with Service("tls_proxy", store.port, made, key) as proxy:
        yield made, {**store.signed(), "endpoint_url": f"https://127.0.0.1:{proxy.port}"}


@pytest.mark.parametrize("way", ["verify", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "not verified"])
def test_the_certificates_of_the_client_are_accepted(
    store: Store, secured: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    made, options = secured
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    if way.isupper():
        monkeypatch.setenv(way, str(made))
    else:
        options = {**options, "client_kwargs": {"verify": str(made) if way == "verify" else False}}
    ranges = store.ranges(40, seed=6)
    before = store.service.ask({})
    with Reader("s3://data", options=options, deadline=60) as reader:
        assert list(reader.read_ranges(ranges)) == store.slices(ranges)
        assert reader.counters().faults == 0
    now = store.service.ask({})
    assert (now["signed"] - before["signed"], now["authorized"] - before["authorized"]) == (40, 0)


def test_an_unknown_certificate_is_refused_at_once(secured: tuple[Path, dict[str, Any]]) -> None:
    with Reader("s3://data", options=secured[1], deadline=60) as reader:
        with pytest.raises(
            StorageError, match="s3://data/a.bin.*SSLCertVerificationError.*AWS_CA_BUNDLE"
        ) as caught:
            reader.read_range("a.bin", 0, 10)
        assert not isinstance(caught.value, UnavailableError)
        assert reader.counters().attempts == 1
