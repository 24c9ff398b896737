"""reshard on Ray: a cluster of one machine, whose workers and nodes are killed."""

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sa1b import ray_tasks
from sa1b.errors import UsageError
from sa1b.workers import Event
from tests.cli.verb import runner
from tests.ingest.test_links import contents
from tests.processes import REPOSITORY
from tests.shards import tiny

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
reshard = runner("reshard")
verify = runner("verify")
export = runner("export")
SOURCES = 4


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    folder = tmp_path / "downloads"
    folder.mkdir()
    for number in range(SOURCES):
        tiny.make_tar(folder / f"sa_00000{number}.tar", range(100 * number, 100 * number + 3))
    return folder


def events_of(script: str, folder: Path) -> list[Event]:
    """The events of a call of supervise in a new process, which has a cluster of its own."""
    program = f"""
import pickle, sys
from sa1b.ray_tasks import cluster, supervise
from tests.cluster import ray_work
with cluster(None, 2) as workers:
    found = list({script})
pickle.dump(found, open("events", "wb"))
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return pickle.loads((folder / "events").read_bytes())


def kinds(events: list[Event], task: int) -> list[str]:
    return [event.kind for event in events if event.task == task]


@pytest.mark.slow
def test_events_are_those_of_processes(tmp_path: Path) -> None:
    tasks = [
        "(ray_work.count, 50)",
        "(ray_work.fail,)",
        "(ray_work.die_until, Path('twice'), 2)",
        "(ray_work.die_until, Path('always'), 100)",
        "(ray_work.stall_once, Path('stalled'))",
    ]
    (tmp_path / "x").mkdir()
    script = (
        "supervise(ray_work.call, ["
        + ", ".join(task.replace("Path('", f"Path('{tmp_path}/x/") for task in tasks)
        + "], workers=workers, retries=2, stall_timeout=5)"
    )
    events = events_of(script.replace("Path(", "__import__('pathlib').Path("), tmp_path)
    assert [event.value for event in events if event.task == 0] == [*range(50), 50]
    assert kinds(events, 0) == ["progress"] * 50 + ["done"]
    (failed,) = [event.value for event in events if event.task == 1]
    assert (failed.kind, failed.message, failed.expected) == ("ValueError", "no", False)
    ends = [[kind for kind in kinds(events, task) if kind != "progress"] for task in (2, 3, 4)]
    assert ends == [["died", "died", "done"], ["died", "died", "lost"], ["died", "done"]]
    assert "worker process died" in next(event.value for event in events if event.kind == "lost")
    assert "no progress for 5 s" in next(
        event.value for event in events if (event.task, event.kind) == (4, "died")
    )


@pytest.mark.slow
def test_the_actor_with_the_reports_that_hangs_or_dies_ends_the_command_with_the_reason(
    tmp_path: Path,
) -> None:
    program = """
import os, signal
from sa1b import ray_tasks
from sa1b.errors import UsageError
from tests.cluster import ray_work
with ray_tasks.cluster(None, 2):
    pool = ray_tasks._Pool(ray_work.folder, [()], 0, None)
    board = pool.ray.get(pool.board.__ray_call__.remote(lambda actor: os.getpid()))
    ray_tasks._ANSWER = 2.0
    for number in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(board, number)
        try:
            pool.take()
        except UsageError as error:
            print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    hung, dead = (line for line in done.stderr.splitlines() if line.startswith("--engine ray"))
    assert hung.startswith(
        "--engine ray: the actor with the progress reports, on this machine: no answer within 2 s"
    )
    assert "ActorDiedError" in dead
    assert dead.endswith("start the same command again")


@pytest.mark.slow
def test_tasks_run_in_the_folder_of_the_command_and_the_user_is_told_why_none_starts(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    program = """
import os, sys
from sa1b import ray_tasks
from tests.cluster import ray_work
with ray_tasks.cluster(None, 1) as workers:
    os.chdir("below")
    (event,) = ray_tasks.supervise(ray_work.folder, [()], workers=workers)
    print(event.value)
    ray_tasks.MEMORY, ray_tasks._IDLE = 1 << 40, 0.5
    class Notes:
        def write(self, text):
            raise ZeroDivisionError(text)
    real, sys.stderr = sys.stderr, Notes()
    try:
        list(ray_tasks.supervise(ray_work.folder, [()], workers=workers))
    except ZeroDivisionError as note:
        sys.stderr = real
        print(note)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert f"{tmp_path}/below" in done.stderr  # in the context, stdout is stderr
    assert "no worker has started for" in done.stderr


@pytest.mark.slow
def test_a_machine_without_the_package_is_reported(tmp_path: Path, downloads: Path) -> None:
    (tmp_path / "fake" / "sa1b").mkdir(parents=True)
    (tmp_path / "fake" / "sa1b" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'sa1b'\")"
    )
    program = """
import os, sys, time
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "fake")},
    )  # fmt: skip
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        address = other.stdout.readline().strip()
        # Not in the folder of the package, which Ray would make importable for the workers.
        done = subprocess.run(
            [
                *(sys.executable, "-m", "sa1b", "reshard", str(downloads), "--out", str(tmp_path / "root")),
                *("--engine", "ray", "--address", address),
            ],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert "cannot import this package (No module named 'sa1b')" in done.stderr
        assert "Traceback" not in done.stderr
        # Without --address, a cluster of its own is started beside the other one.
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("RAY_ADDRESS", address)
            done = reshard(downloads, "--out", tmp_path / "root", "--engine", "ray", "--workers", 1)
        assert done.returncode == 0, done.stderr
    finally:
        other.stdin.close()
        other.wait(60)


def test_a_folder_that_a_machine_lacks_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot enter .*gone, the folder of the command \(No such file"):
        ray_tasks._enter(str(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "--address 127.0.0.1:1: no Ray cluster answers there"),
        ("127.0.0.1:x", "'x' is no port"),
        ("ray://127.0.0.1:10001", "the Ray client, which is not supported"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        ray_tasks._probe(address)


def test_a_run_on_ray_makes_the_dataset_of_a_local_run(tmp_path: Path, downloads: Path) -> None:
    done = reshard(downloads, "--out", tmp_path / "root", "--engine", "ray", "--workers", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["done"]) == SOURCES
    assert reshard(downloads, "--out", tmp_path / "local").returncode == 0
    assert contents(tmp_path / "root") == contents(tmp_path / "local")


@pytest.mark.slow
def test_verify_and_export_on_ray_report_and_write_what_processes_do(tmp_path: Path, downloads: Path) -> None:
    assert reshard(downloads, "--out", tmp_path / "root").returncode == 0
    shard = next((tmp_path / "root").glob("sa1b-000003-*.tar"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    ray = ("--engine", "ray", "--workers", 2)
    reports = []
    for engine in (ray, ()):
        done = verify(tmp_path / "root", "--deep", "--json", *engine)
        assert done.returncode == 1, done.stderr
        reports.append(json.loads(done.stdout) | {"seconds": 0})
    assert reports[0] == reports[1]
    assert reports[0]["shards"] == SOURCES
    shard.write_bytes(whole)
    for out, engine in (("ray", ray), ("here", ())):
        done = export(tmp_path / "root", "--to", "sa1b", "--out", tmp_path / out, *engine)
        assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "here").glob("*.tar"))
    assert names == sorted(path.name for path in (tmp_path / "ray").iterdir() if path.name[0] != ".")
    assert len(names) == SOURCES
    for name in names:
        assert (tmp_path / "ray" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_wrong_flags(tmp_path: Path, downloads: Path) -> None:
    for verb, words in (
        (reshard, (downloads, "--out", tmp_path / "root")),
        (verify, (tmp_path,)),
        (export, (tmp_path, "--to", "sa1b", "--out", tmp_path / "out")),
    ):
        for flags, message in (
            (("--address", "auto"), "--address auto: is for --engine ray"),
            (("--workers", 0), "--workers 0: must be at least 1"),
        ):
            done = verb(*words, *flags)
            assert done.returncode == 2
            assert message in done.stderr
