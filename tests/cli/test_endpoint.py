"""--endpoint: one flag of every verb that takes a URL, with the effect of the variable of its protocol."""

import os
import shutil
from dataclasses import replace
from inspect import signature
from pathlib import Path

import pytest

from sa1b import verbs
from sa1b.engine.config import set_endpoint
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS
from sa1b.sources.path_arguments import Endpoint, takes_endpoint
from sa1b.storage import protocols
from tests.cli.verb import runner
from tests.shards import tiny
from tests.storage.service import Service

WITHOUT = {  # they have no argument that may be a URL, or give it to a verb that has the flag
    "train": "--data.endpoint",
    "plan train": "estimates without a dataset",
    "slurm": "passes the flag on",
    "synthesize": "writes a local folder",
}


def test_every_verb_with_a_url_has_the_flag() -> None:
    for verb in verbs.in_order():
        if verb not in WITHOUT:
            assert signature(verbs.module_of(verb).main).parameters["endpoint"].annotation is Endpoint, verb


def test_the_store_of_the_endpoint_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    tiny.make_tar(tmp_path / "sa_000001.tar", range(3))
    tiny.ingest_tar(tmp_path / "sa_000001.tar", tmp_path / "root")
    shutil.copytree(tmp_path / "root", tmp_path / "store" / "data" / "shards")
    with Service("object_server", tmp_path / "store") as server:
        words = ("s3://data/shards", 2, "--tsv", "--endpoint", server.url)
        done = runner("locate")(*words)
    assert done.returncode == 0, done.stderr
    assert "sa1b-000001-0000" in done.stdout


def test_the_variable_is_set_for_the_command_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://before")
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    seen = []

    @takes_endpoint
    def main(root: str, /, others: tuple[str, ...] = ()) -> int:
        seen.append([os.environ.get(one) for one in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST")])
        return len(others)

    assert main("s3://a/b", others=("gs://c", "d"), endpoint="http://x") == 2
    assert main("s3://a/b") == 0
    assert main("gs://a/b", endpoint="http://x") == 0
    assert seen == [["http://x", "http://x"], ["http://before", None], ["http://before", "http://x"]]
    assert "STORAGE_EMULATOR_HOST" not in os.environ
    for root, message in (
        ("folder", "only with a URL"),
        ("az://a/b", "BlobEndpoint"),
        ("https://a", "only with"),
    ):
        with pytest.raises(UsageError, match=f"--endpoint http://x: .*{message}"):
            main(root, endpoint="http://x")
    assert len(seen) == 3


def test_each_protocol_with_an_endpoint_has_a_variable() -> None:
    for kind in protocols.KINDS:
        assert bool(kind.endpoint) == bool(kind.endpoint_variable)


@pytest.mark.parametrize(("before", "after"), [(None, "http://a"), ("http://b", "http://b")])
def test_the_endpoint_of_the_data_is_that_of_a_run_in_a_bucket(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", before or "")
    if before is None:
        monkeypatch.delenv("AWS_ENDPOINT_URL")
    data = replace(PRESETS["tiny"].data, endpoint="http://a")
    set_endpoint(replace(PRESETS["tiny"], data=data, out="run"))
    assert os.environ.get("AWS_ENDPOINT_URL") == before
    set_endpoint(replace(PRESETS["tiny"], data=data, out="s3://bucket/run"))
    assert os.environ["AWS_ENDPOINT_URL"] == after
