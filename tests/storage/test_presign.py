"""Signed reads of an S3 store: each object is signed once, and refusals are answered with a new signature."""

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import s3fs

from sa1b.storage import http_range
from sa1b.storage.connection import connect
from sa1b.storage.errors import DeniedError, UnavailableError
from sa1b.storage.protocols import can_presign
from sa1b.storage.reader import Reader
from sa1b.storage.retry import RetryPolicy
from tests.storage.conftest import SIZE, UNHURRIED, Store, WaitedTime


@pytest.fixture
def signings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each object is signed."""
    counts: Counter[str] = Counter()
    sign = s3fs.S3FileSystem._url

    async def counting(self: Any, path: str, **arguments: Any) -> Any:
        counts[path] += 1
        return await sign(self, path, **arguments)

    monkeypatch.setattr(s3fs.S3FileSystem, "_url", counting)
    return counts


@pytest.fixture
def requests(store: Store) -> Any:
    """The requests since the test began: with a presigned URL, and with a signature in the header."""
    before = store.service.ask({})

    def counts() -> tuple[int, int]:
        now = store.service.ask({})
        return now["signed"] - before["signed"], now["authorized"] - before["authorized"]

    return counts


def test_an_object_is_signed_once_for_all_ranges(store: Store, signings: Counter[str], requests: Any) -> None:
    ranges = [*store.ranges(60), *store.ranges(60, seed=1, name="deep/b c+ü.bin", longest=1000)]
    with Reader("s3://data", options=store.signed()) as reader:
        assert list(reader.read_ranges(ranges)) == store.slices(ranges)
        assert reader.size("a.bin") == SIZE
        assert reader.size("empty.bin") == 0
        assert reader.counters().faults == 0
    assert signings == {"data/a.bin": 1, "data/deep/b c+ü.bin": 1, "data/empty.bin": 1}
    assert requests() == (122, 0)


def test_an_object_is_signed_again_before_its_signature_expires(
    store: Store, signings: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr(http_range, "time", SimpleNamespace(time=lambda: clock.now))
    with Reader("s3://data", options=store.signed()) as reader:
        for share, signed in ((0.0, 1), (0.89, 1), (0.91, 2), (1.7, 2), (2.0, 3)):
            clock.now = 1e9 + share * http_range.LIFETIME
            assert reader.read_range("a.bin", 0, 10) == store.bytes()[:10]
            assert signings["data/a.bin"] == signed
        assert reader.counters().faults == 0


def test_an_object_is_signed_again_when_its_credentials_are_renewed(
    store: Store, signings: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1e9)
    monkeypatch.setattr(http_range, "time", SimpleNamespace(time=lambda: clock.now))

    async def renewed(client: Any) -> float:
        return clock.now // 1000

    monkeypatch.setattr(http_range, "_current_credentials", renewed)
    with Reader("s3://data", options=store.signed()) as reader:
        for seconds, signed in ((0, 1), (100, 1), (999, 1), (1061, 2), (1100, 2)):
            clock.now = 1e9 + seconds
            reader.read_range("a.bin", 0, 10)
            assert signings["data/a.bin"] == signed


def test_the_credentials_of_a_client_are_found(store: Store) -> None:
    async def found(options: dict[str, Any]) -> Any:
        system = connect("s3://data", options, RetryPolicy(), 1)
        client = await system.set_session()
        credentials = await http_range._current_credentials(client)
        await client.close()
        return credentials

    assert asyncio.run(found({**store.signed(), "token": "t"}))[:3] == ("KEY", "secret", "t")
    assert asyncio.run(found(store.options())) is None


def test_a_signature_that_the_store_refuses_is_renewed_in_the_middle(
    store: Store, requests: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = store.ranges(200, seed=2)
    with Reader("s3://data", options=store.signed(), retry_policy=UNHURRIED) as reader:
        reads = reader.read_ranges(ranges)
        found = [next(reads) for _ in range(20)]
        monkeypatch.setattr(
            http_range, "LIFETIME", 1000
        )  # otherwise the signature of this second is the same
        store.service.ask({"do": "revoke"})
        found += reads
        assert found == store.slices(ranges)
        assert 0 < reader.counters().expired == reader.counters().faults <= 2 * reader.attempts_in_flight
    assert requests()[1] == 0
    store.service.ask({"do": "accept"})  # another test may sign the same in this second


def test_an_object_that_is_denied_though_others_are_not(store: Store) -> None:
    with Reader("s3://data", options=store.signed(), retry_policy=UNHURRIED) as reader:
        reader.read_range("a.bin", 0, 10)
        for _ in range(2):
            with pytest.raises(
                DeniedError, match="s3://data/secret.bin: access denied.*AWS_ACCESS_KEY"
            ) as caught:
                reader.read_range("secret.bin", 0, 10)
            assert "expired" not in str(caught.value)
        assert reader.read_range("a.bin", 5, 10) == store.bytes()[5:15]


def test_a_store_that_takes_no_presigned_requests_is_read_by_the_file_system(
    store: Store, requests: Any
) -> None:
    ranges = store.ranges(20)
    with Reader("s3://header", options=store.signed()) as reader:
        assert [reader.read_range(r.name, r.start, r.length, r.crc) for r in ranges] == store.slices(ranges)
        assert reader.size("a.bin") == SIZE
        assert reader.counters().faults == 0
    assert requests() == (1, 21)


def test_keys_for_encryption_are_sent_by_the_file_system(store: Store, requests: Any) -> None:
    key = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "0" * 32}
    options = {**store.signed(), "s3_additional_kwargs": key}
    assert not can_presign("s3://data", options)
    with Reader("s3://data", options=options) as reader:
        assert reader.read_range("a.bin", 0, 10) == store.bytes()[:10]
    assert requests() == (0, 1)


@pytest.mark.parametrize("root", ["s3://b--usw2-az1--x-s3/a", "s3://arn:aws:s3::1:accesspoint/b.mrap/a"])
def test_buckets_that_cannot_be_presigned(root: str) -> None:
    assert not can_presign(root, {})
    assert can_presign("s3://bucket/folder--x-s3", {"config_kwargs": {"region_name": "x"}})


def test_the_requester_pays_for_presigned_requests_too(store: Store, requests: Any) -> None:
    with Reader("s3://data", options={**store.signed(), "requester_pays": True}) as reader:
        assert reader.read_range("a.bin", 0, 10) == store.bytes()[:10]
    assert requests() == (1, 0)


def test_anonymous_reads_have_no_signature(store: Store, requests: Any) -> None:
    with Reader("s3://data", options=store.options()) as reader:
        assert reader.read_range("a.bin", 0, 10) == store.bytes()[:10]
    assert requests() == (0, 0)


def test_a_proxy_of_the_environment_is_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{store.port}")
    for root, options in (
        ("s3://data", {**store.signed(), "endpoint_url": "http://store.invalid"}),
        ("http://web.invalid/data", {}),
    ):
        with Reader(root, options=options, deadline=20) as reader:
            assert reader.read_range("a.bin", 0, 10) == store.bytes()[:10]


def test_no_message_contains_a_signature(store: Store, waited: WaitedTime) -> None:
    for root, name in (("s3://denied", "a.bin"), ("s3://shifted", "a.bin"), ("s3://data", "missing.bin")):
        with (
            Reader(root, options=store.signed(), retry_policy=waited.policy(20)) as reader,
            pytest.raises(Exception, match=f"{root}/{name}") as caught,
        ):
            reader.read_range(name, 5, 10)
        error: BaseException | None = caught.value
        while error is not None:
            assert "X-Amz" not in repr(error) + str(error)
            error = error.__cause__ or error.__context__


def test_the_bytes_of_another_range_are_not_taken_even_without_a_crc(
    store: Store, waited: WaitedTime
) -> None:
    for root, options in (("s3://shifted", store.signed()), (f"http://127.0.0.1:{store.port}/shifted", {})):
        with (
            Reader(root, options=options, retry_policy=waited.policy(20)) as reader,
            pytest.raises(UnavailableError, match="bytes 101 to 201 received, 100 to 200 requested"),
        ):
            reader.read_range("a.bin", 100, 100)


def test_threads_share_the_signatures(store: Store, signings: Counter[str]) -> None:
    ranges = store.ranges(80, seed=9)
    found: dict[int, bytes] = {}
    with Reader("s3://data", options=store.signed()) as reader:

        def work(first: int) -> None:
            for i in range(first, len(ranges), 8):
                item = ranges[i]
                found[i] = reader.read_range(item.name, item.start, item.length, item.crc)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [found[i] for i in range(len(ranges))] == store.slices(ranges)
    assert signings == {"data/a.bin": 1}
