"""Failure drill of distributed conversion: one fault in each run, then the dataset is compared.

    python -m tests.cluster.drill --launcher ray --fault driver --runs 10 --seed 1

Launchers: processes (`sa1b reshard`), ray (`--engine ray`, a cluster of its own in each run), nodes (a Ray
cluster of two nodes on this machine), slurm (an array of two tasks of `sa1b slurm reshard` on a SLURM of one
node). Faults: worker (SIGKILL of a process that holds a claim), driver (SIGKILL of the command, which then runs
again; with slurm: of a task, which is then queued again), holder (SIGSTOP of a process that holds a claim until
another machine has done its work, then SIGCONT), node (only with nodes: SIGKILL of all processes of the second
node), finish (as driver, once all sources are converted and dataset.json is being written; with slurm, all tasks
are queued again).
"""

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster import slurm_node
from tests.ingest.test_links import contents
from tests.processes import REPOSITORY
from tests.shards import tiny

SOURCES, IMAGES = 4, 120
CLAIM_TIMEOUT = "3"
TRIES = 4  # runs for each demanded one: a fault may come after the end of a run, which is then repeated
PATIENCE = 240.0  # seconds until a run counts as hanging


def make_sources(folder: Path) -> Path:
    """Source tars that take about a second each."""
    folder.mkdir()
    for number in range(SOURCES):
        tiny.make_tar(folder / f"sa_00000{number}.tar", range(1000 * number, 1000 * number + IMAGES))
    return folder


def start(downloads: Path, root: Path, *flags: str, elsewhere: bool = False) -> subprocess.Popen[str]:
    """Start the command; `elsewhere`: in a pid namespace of its own, so that it counts as another machine."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] if elsewhere else []
    words = [*apart, sys.executable, "-m", "sa1b", "reshard", str(downloads), "--out", str(root)]
    return subprocess.Popen(
        [*words, "--claim-timeout", CLAIM_TIMEOUT, "--images-per-shard", "50", "--json", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )


def ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The summary of a command that must end well."""
    try:
        out, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("the command hangs") from None
    assert process.returncode == 0, f"exit code {process.returncode}: {out}\n{errors}"
    try:
        summary: dict[str, Any] = json.loads(out)
    except ValueError:
        raise AssertionError(f"no JSON: {out!r} {errors!r}") from None
    return summary


def holders(root: Path) -> list[int]:
    """The processes that hold claims."""
    pids = []
    for path in (root / "tasks").glob("*.claim"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            pids.append(int(json.loads(path.read_text())["pid"]))
    return pids


def holder(root: Path, process: subprocess.Popen[str], rng: random.Random) -> int | None:
    """A process that holds the claim of a source; None if the command has ended before."""
    while process.poll() is None:
        if pids := holders(root):
            return rng.choice(pids)
        time.sleep(0.005)
    return None


def converted(root: Path, alive: Callable[[], bool]) -> None:
    """Wait until all sources are converted."""
    while alive() and len(list((root / "tasks").glob("sa_*.json"))) < SOURCES:
        time.sleep(0.002)


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process; whether it existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def run_once(launcher: str, fault: str, downloads: Path, expected: dict[str, bytes], seed: int) -> str:
    """One run with one fault; returns what happened. Raises AssertionError if anything was lost."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="sa1b-drill-"))
    root = folder / "root"
    flags = {"processes": ["--workers", "2"], "ray": ["--engine", "ray", "--workers", "2"], "nodes": []}[
        launcher
    ]
    cluster: Any = None
    node: Any = None
    try:
        if launcher == "nodes":
            from ray.cluster_utils import Cluster

            cluster = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20}
            )
            node = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
            cluster.wait_for_nodes()
            flags = ["--engine", "ray", "--address", cluster.address]
        process = start(downloads, root, *flags)
        pid = holder(root, process, rng)
        time.sleep(rng.random() * 0.7)
        done = "too late"
        if fault == "worker" and pid is not None:
            done = "killed" if send(pid, signal.SIGKILL) else done
        elif fault == "node" and process.poll() is None:
            cluster.remove_node(node, allow_graceful=False)
            done = "killed"
        elif fault in ("driver", "finish"):
            if fault == "finish":
                converted(root, lambda: process.poll() is None)
                is_late = (root / "dataset.json").exists()
            else:
                is_late = process.poll() is not None
            done = "too late" if is_late else "killed"
            process.kill()
            process.communicate()
            process = start(downloads, root, *flags)
        elif fault == "holder" and pid is not None and send(pid, signal.SIGSTOP):
            done = "stopped"
            other = start(downloads, root, "--workers", "2", elsewhere=True)
            ended(other)
            send(pid, signal.SIGCONT)
        ended(process)
        compare(root, expected)
        return done
    finally:
        if cluster is not None:
            cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def compare(root: Path, expected: dict[str, bytes]) -> None:
    found = contents(root)
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    assert found == expected, [name for name in found if found[name] != expected[name]]


def run_slurm(
    node: slurm_node.Node, fault: str, downloads: Path, expected: dict[str, bytes], seed: int
) -> str:
    """Like `run_once`, with an array of two tasks."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="sa1b-drill-") as folder:
        root, path = Path(folder, "root"), Path(folder, "job.sh")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "sa1b", "slurm", "reshard", "--tasks", "2", "--cpus", "1"),
                *("--memory", "1G", "--logs", folder, str(downloads), "--out", str(root)),
                *("--setup", f"export OMP_NUM_THREADS=1 PYTHONPATH={shlex.quote(str(REPOSITORY))}"),
                *("--claim-timeout", CLAIM_TIMEOUT, "--images-per-shard", "50", "--stall-timeout", "60"),
            ],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        path.write_text(done.stdout)
        job = node.submit(path)
        pid = None
        while pid is None and node.state(job):
            pid = next(iter(holders(root)), None)
            time.sleep(0.005)
        if fault == "finish":
            converted(root, lambda: bool(node.state(job)))
        else:
            time.sleep(rng.random() * 2)
        pids = holders(root)
        if fault == "finish":
            what = "too late" if (root / "dataset.json").exists() else "killed"
            for task in (f"{job}_0", f"{job}_1"):
                if node.task_state(task) == "RUNNING":
                    node.run("scontrol", "requeue", task, folder=Path(folder))
        elif not pids:
            what = "too late"
        elif fault == "holder":
            pid, what = rng.choice(pids), "stopped"
            send(pid, signal.SIGSTOP)
            other = start(downloads, root, "--workers", "2", elsewhere=True)
            ended(other)
            send(pid, signal.SIGCONT)
        else:
            pid, what = rng.choice(pids), "killed"
            try:  # the command is the first process of the group
                send(os.getpgid(pid) if fault == "driver" else pid, signal.SIGKILL)
            except ProcessLookupError:
                what = "too late"
        deadline = time.monotonic() + PATIENCE
        while node.state(job):
            assert time.monotonic() < deadline, "the job hangs"
            node.start_now(job)
            time.sleep(0.2)
        if fault == "driver":
            for task in (f"{job}_0", f"{job}_1"):
                if node.task_state(task) == "FAILED":
                    node.run("scontrol", "requeue", task, folder=Path(folder))
            while node.state(job):
                assert time.monotonic() < deadline, "the job hangs"
                node.start_now(job)
                time.sleep(0.2)
        logs = "\n".join(log.read_text() for log in sorted(Path(folder).glob("*.log")))
        assert set(node.exit_codes(job)) == {"0:0"}, logs
        compare(root, expected)
        return what


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launcher", choices=("processes", "ray", "nodes", "slurm"), required=True)
    parser.add_argument("--fault", choices=("worker", "driver", "holder", "node", "finish"), required=True)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sa1b-drill-") as folder, contextlib.ExitStack() as stack:
        downloads = make_sources(Path(folder, "downloads"))
        ended(start(downloads, Path(folder, "local")))
        expected = contents(Path(folder, "local"))
        node = stack.enter_context(slurm_node.Node()) if chosen.launcher == "slurm" else None
        faults = 0
        for number in range(TRIES * chosen.runs):
            began = time.monotonic()
            seed = chosen.seed + number
            if node is not None:
                done = run_slurm(node, chosen.fault, downloads, expected, seed)
            else:
                done = run_once(chosen.launcher, chosen.fault, downloads, expected, seed)
            line = f"{chosen.launcher} {chosen.fault} seed {seed}: {done}, dataset identical"
            print(f"{line}, {time.monotonic() - began:.1f} s", flush=True)
            faults += done != "too late"
            if faults == chosen.runs:
                return
        sys.exit(f"only {faults} of {TRIES * chosen.runs} runs had the fault before they ended")


if __name__ == "__main__":
    main()
