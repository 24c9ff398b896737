"""A dataset directory in Google Cloud Storage and Azure Blob Storage: checked, used and copied back.

By emulators on this machine; skipped where gcsfs, adlfs or the emulators are not installed.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import sa1b
from tests.storage import azurite, gcs
from tests.storage.conftest import azurite_server, cloud, cloud_bucket, gcs_server
from tests.transfer.test_ceph import files

__all__ = ["azurite_server", "cloud", "cloud_bucket", "gcs_server"]
Server = gcs.Server | azurite.Server
REPOSITORY = Path(__file__).parents[2]


def test_all_commands_on_a_url(root, cloud, cloud_bucket, tmp_path, monkeypatch):
    """copy, verify, view, gallery, export, index, copy back and a stream: everything equals the folder's."""
    for name, value in {**cloud.environment, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    url, scratch = cloud_bucket.root, ("--scratch", tmp_path / "scratch")

    def run(*arguments: object, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "sa1b", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == code, done.stderr + done.stdout
        assert "Traceback" not in done.stderr
        return done.stdout

    run("copy", root, url, "--workers", 2, *scratch)
    assert f"Clean: {url}" in run("verify", url, "--deep", "--workers", 2, *scratch)
    run("view", url, "--masks-where", "area > 40", "--name", "good")
    run("gallery", url, "--view", "good", "--count", 4, "--out", "page.html")
    assert len((tmp_path / "page.html").read_bytes()) > 10_000
    run("view", root, "--masks-where", "area > 40", "--name", "good")
    for one, name in ((root, "here"), (url, "there")):
        run("export", one, "--to", "sa1b", "--view", "good", "--out", name, "--workers", 2)
    here, there = (
        {name: data for name, data in files(tmp_path / one).items() if name.endswith(".tar")}
        for one in ("here", "there")
    )
    assert here
    assert here == there
    cloud_bucket.remove("sa1b-000001-0001.parquet", "dataset.json")
    report = json.loads(run("verify", url, "--json", *scratch, code=1))
    assert {one["kind"] for one in report["findings"]} == {"dataset_missing", "index_missing"}
    run("index", url, "--workers", 2, *scratch)
    run("copy", url, "back", "--workers", 2, *scratch)
    assert files(tmp_path / "back") == files(root)
    assert [path for path in (tmp_path / "scratch").rglob("*") if path.is_file()] == []

    def digests(where: object, **options: object) -> list[object]:
        stream = sa1b.Stream(where, global_batch=2, image_size=64, masks=2, **options)
        loader = sa1b.Loader(stream, threads=2, quiet=True)
        return [(batch.ids.tolist(), batch.images.numpy().tobytes()) for batch in loader]

    assert digests(url, storage_options=cloud.options) == digests(root)
    run("bench", url, "--image-size", 64, "--seconds", 1)


@pytest.mark.parametrize("engine", ["fork", "spawn", "forkserver"])
def test_dataloader_workers_read_from_a_url(root, cloud, cloud_bucket, tmp_path, monkeypatch, engine):
    """Clients are rebuilt in every process."""
    import torch

    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        cloud_bucket.put(str(path.relative_to(root)), path.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"global_batch": 2, "image_size": 64, "masks": 2, "storage_options": cloud.options}
    stream = sa1b.Stream(cloud_bucket.root, **settings)
    alone = sorted(int(one) for batch in sa1b.Loader(stream, threads=1, quiet=True) for one in batch.ids)
    workers = torch.utils.data.DataLoader(
        sa1b.Stream(cloud_bucket.root, **settings),
        batch_size=None,
        num_workers=2,
        multiprocessing_context=engine,
    )
    assert sorted(int(one) for batch in workers for one in batch.ids) == alone
