"""`sa1b copy` from the shell."""

import json
import shutil
import subprocess
import sys

import pytest

from sa1b.console import command
from tests.cli.verb import called, runner
from tests.shards.tiny_source import ROOTS, add_layer, make_root, two_sources

run = runner("copy")
verify = runner("verify")
view = runner("view")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    root = make_root(folder / "root", two_sources(folder), ROOTS["plain"])
    add_layer(root)
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "root")


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_copy(root, tmp_path):
    done = run(root, tmp_path / "copy", "--workers", 2)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"Complete: {tmp_path}/copy/dataset.json")
    assert files(tmp_path / "copy") == files(root)
    again = json.loads(run(root, tmp_path / "copy", "--json").stdout)
    assert (again["exit_code"], again["skipped"], again["bytes_copied"]) == (0, ["sa_000001", "sa_000002"], 0)


def test_to_a_bucket_and_back(root, tmp_path):
    """A bucket of fsspec's local file system, which creates no folders."""
    for folder in ("tasks", "layers/round2", "quarantine/sa_000001", "quarantine/sa_000002"):
        (tmp_path / "bucket" / folder).mkdir(parents=True)
    url = f"local://{tmp_path}/bucket"
    done = run(root, url, "--scratch", tmp_path / "scratch")
    assert done.returncode == 0, done.stderr
    assert "Clean" in verify(url, "--deep", "--workers", 2, "--scratch", tmp_path / "scratch").stdout
    done = run(url, tmp_path / "back", "--scratch", tmp_path / "scratch")
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "back") == files(root)


def test_a_view(root, tmp_path):
    assert view(root, "--subset", "40%", "--name", "part").returncode == 0
    done = run(root, tmp_path / "copy", "--view", "part")
    assert done.returncode == 0, done.stderr
    assert verify(tmp_path / "copy", "--deep").returncode == 0
    again = view(tmp_path / "copy", "--ids", next((root / "views").glob("*.ids")), "--json")
    assert json.loads(again.stdout)["missing"] == 0


def test_a_damaged_source_is_left_out(root, tmp_path):
    (root / "sa1b-000001-0000.parquet").unlink()
    done = run(root, tmp_path / "copy")
    assert done.returncode == 1
    assert (
        f"FAILED sa_000001: {root}/sa1b-000001-0000.parquet: missing; run `{command('index')} " in done.stdout
    )
    assert done.stdout.splitlines()[-1].startswith(f"Not complete: {tmp_path}/copy/dataset.json")


def test_from_a_web_server(root, tmp_path):
    """Its listings have no sizes."""
    (tmp_path / "quiet.py").write_text(
        "import functools, http.server, sys\n"
        "kind = http.server.SimpleHTTPRequestHandler\n"
        "kind.log_message = lambda *_: None\n"
        "server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(kind, directory=sys.argv[1]))\n"
        "print(server.server_port, flush=True)\n"
        "server.serve_forever()\n"
    )
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "quiet.py"), str(root)], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            done = run(url, tmp_path / "copy")
            assert done.returncode == 0, done.stderr
            assert files(tmp_path / "copy") == files(root)
            assert "Clean" in verify(url).stdout
            done = run(root, f"{url}/new")
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
            assert "can only be read; name a folder" in done.stderr
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--workers", "0"), "--workers 0: must be at least 1"),
        (("--shards", "*", "--view", "x"), "--shards: cannot be combined with --view"),
        (("--shards", "none"), "--shards none: no shard of "),
        (("--view", "none"), "no view 'none' in "),
        (("--scratch", "x"), "--scratch x: only for a dataset directory at a URL"),
    ],
)
def test_what_cannot_be_done(root, tmp_path, flags, message):
    done = called("copy")(root, tmp_path / "copy", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("verb", ["view", "gallery", "export"])
def test_a_url_as_out_of_another_command_is_refused(root, tmp_path, verb):
    more = ("--to", "sa1b") if verb == "export" else ()
    done = called(verb)(root, "--out", "s3://bucket/out", *more)
    assert done.returncode == 2
    assert "error: --out s3:/bucket/out: must be a path of this machine, not a URL" in done.stderr
