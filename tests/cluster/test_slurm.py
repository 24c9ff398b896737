"""Job scripts run by a real SLURM of one node, with tasks that are killed, queued again and preempted."""

import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.cli.verb import runner
from tests.cluster import slurm_node
from tests.ingest.test_links import contents
from tests.processes import REPOSITORY
from tests.shards import tiny
from tests.train import command

slurm = runner("slurm")
reshard = runner("reshard")
pytestmark = pytest.mark.skipif(
    bool(slurm_node.missing()), reason=f"SLURM: {slurm_node.missing()}; {slurm_node.INSTALL}"
)
SETUP = f"export PYTHONPATH={shlex.quote(str(REPOSITORY))}"


@pytest.fixture(scope="module")
def node() -> Iterator[slurm_node.Node]:
    with slurm_node.Node() as running:
        yield running


def script(path: Path, *words: object) -> Path:
    done = slurm(*words)
    assert done.returncode == 0, done.stderr
    path.write_text(done.stdout)
    return path


def wait(node: slurm_node.Node, job: str, folder: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while node.state(job):
        assert time.monotonic() < deadline, node.run("scontrol", "show", "job", job, folder=folder)
        node.start_now(job)
        time.sleep(0.2)


def logs(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(folder.glob("*.log")))


def test_an_array_of_tasks_makes_the_dataset_of_one_run(node: slurm_node.Node, tmp_path: Path) -> None:
    downloads, log_folder = tmp_path / "it's $HOME", tmp_path / "100% #logs"
    for folder in (downloads, log_folder):
        folder.mkdir()
    for number in range(3):
        tiny.make_tar(downloads / f"sa_00000{number}.tar", range(100 * number, 100 * number + 3))
    flags = ("--tasks", 2, "--cpus", 1, "--memory", "1G", "--logs", "100% #logs", "--setup", SETUP)
    job = node.submit(script(tmp_path / "job.sh", "reshard", *flags, downloads.name, "--out", "the root"))
    wait(node, job, tmp_path)
    assert set(node.exit_codes(job)) == {"0:0"}, logs(log_folder)
    assert len(list(log_folder.iterdir())) == 2
    done = reshard(downloads, "--out", tmp_path / "local")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "the root") == contents(tmp_path / "local")


@pytest.mark.slow
def test_the_doctor_examines_the_ranks_of_a_job(node: slurm_node.Node, tmp_path: Path) -> None:
    tiny.make_tar(tmp_path / "sa_000001.tar", range(100, 106))
    tiny.ingest_tar(tmp_path / "sa_000001.tar", tmp_path / "root", images_per_shard=2)
    flags = ("--gpus", 0, "--cpus", 2, "--setup", SETUP)
    words = ("--timeout", 120, "--only", "dataset", "--only", "cpus", "--only", "rendezvous")
    path = script(tmp_path / "job.sh", "doctor", *flags, "root", *words)
    text = path.read_text().replace("seq 0 0", "seq 0 1").replace("* 1 +", "* 2 +")
    path.write_text(
        text.replace('LOCAL_WORLD_SIZE=1 WORLD_SIZE="$((1 *', 'LOCAL_WORLD_SIZE=2 WORLD_SIZE="$((2 *')
    )
    job = node.submit(path)
    wait(node, job, tmp_path)
    assert set(node.exit_codes(job)) == {"0:0"}, logs(tmp_path)
    assert "2 ranks on 1 host" in logs(tmp_path)
    assert "6 images in 3 shards" in logs(tmp_path)
    assert "2 ranks met at " in logs(tmp_path)


@pytest.mark.slow
def test_an_array_whose_task_is_killed_and_queued_again(node: slurm_node.Node, tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    for number in range(9):
        tiny.make_tar(downloads / f"sa_00000{number}.tar", range(100 * number, 100 * number + 3))
    done = reshard(downloads, "--out", tmp_path / "local")
    assert done.returncode == 0, done.stderr
    job_script = script(
        tmp_path / "job.sh",
        *("reshard", "--tasks", 4, "--cpus", 1, "--memory", "1G", "--setup", SETUP),
        *("downloads", "--out", "root"),
    )
    # The first task kills itself in its first start, when a source of it is converted and another is not.
    text = job_script.read_text()
    text = text.replace(
        "\nexec ",
        '\nif [ "$SLURM_ARRAY_TASK_ID" = 0 ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then\n'
        "    (while [ ! -e root/tasks/sa_000000.json ]; do sleep 0.01; done; touch killed; kill -KILL $$) &\n"
        "fi\nexec ",
    )
    job_script.write_text(text)
    job = node.submit(job_script)
    task = f"{job}_0"
    while not (tmp_path / "killed").exists():
        assert node.state(job), logs(tmp_path)
        time.sleep(0.05)
    # A killed task has failed; a node failure or a preemption would have queued it again.
    while node.task_state(task) == "RUNNING":
        time.sleep(0.05)
    node.run("scontrol", "requeue", task, folder=tmp_path)
    wait(node, job, tmp_path)
    assert contents(tmp_path / "root") == contents(tmp_path / "local"), logs(tmp_path)
    assert set(node.exit_codes(job)) == {"0:0"}
    assert "Complete: root/dataset.json" in logs(tmp_path)


@pytest.mark.slow
def test_a_training_that_is_stopped_before_its_time_limit_ends_as_an_undisturbed_one(
    node: slurm_node.Node, tmp_path: Path
) -> None:
    root = command.make_root(tmp_path)
    flags = [*command.FLAGS, "--parallel.mode", "ddp", "--optim.steps", "400", "--checkpoint.every", "100"]
    (tmp_path / "even").mkdir()
    for name in ("disturbed", "undisturbed"):
        path = script(
            tmp_path / f"{name}.sh",
            *("train", "--gpus", 0, "--cpus", 2, "--logs", "even", "--setup", SETUP),
            *("--setup", f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"),
            *("--data.root", root, "--out", name, *flags),
        )
        path.write_text(path.read_text().replace("--nproc-per-node=1", "--nproc-per-node=2"))
    job = node.submit(tmp_path / "disturbed.sh")
    metrics = tmp_path / "disturbed" / "metrics.jsonl"
    while not (metrics.exists() and '"step": 3' in metrics.read_text()):
        assert node.state(job), logs(tmp_path / "even")
        time.sleep(0.1)
    node.run("scancel", "--batch", "--signal=USR1", job, folder=tmp_path)  # what --signal=B:USR1 sends
    wait(node, job, tmp_path, 600)
    text = logs(tmp_path / "even")
    assert "stop requested: asking the ranks for a checkpoint" in text
    assert "start 1, nodes" in text
    assert "resuming after step" in text
    other = node.submit(tmp_path / "undisturbed.sh")
    wait(node, other, tmp_path, 600)
    one, two = (tmp_path / name for name in ("disturbed", "undisturbed"))
    assert command.losses(one) == command.losses(two), logs(tmp_path / "even")
    step = max(command.checkpoint_steps(one))
    assert step == 400
    last = [command.tensors(out / "checkpoints" / f"step-{step:08d}") for out in (one, two)]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.slow
@pytest.mark.parametrize("grace", [0, 30])
def test_a_preempted_training_on_three_nodes_ends_as_an_undisturbed_one(tmp_path: Path, grace: int) -> None:
    root = command.make_root(tmp_path)
    (tmp_path / "logs").mkdir()
    flags = [*command.FLAGS, "--parallel.mode", "ddp", "--optim.steps", "100", "--checkpoint.every", "100"]
    for name in ("preempted", "undisturbed"):
        path = script(
            tmp_path / f"{name}.sh",
            *("train", "--nodes", 3, "--gpus", 0, "--cpus", 1, "--logs", "logs", "--setup", SETUP),
            *("--setup", f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"),
            *("--data.root", root, "--out", name, *flags),
        )
        path.write_text(path.read_text().replace("head=${hosts", "hosts=127.0.0.1; head=${hosts"))
    (tmp_path / "other.sh").write_text("#!/bin/bash\n")
    with slurm_node.Node(nodes=3, grace=grace) as node:
        job = node.submit(tmp_path / "preempted.sh")
        metrics = tmp_path / "preempted" / "metrics.jsonl"
        while not (metrics.exists() and '"step": 3' in metrics.read_text()):
            assert node.state(job), logs(tmp_path / "logs")
            time.sleep(0.1)
        node.submit(tmp_path / "other.sh", "--partition=first", "--exclusive")
        wait(node, job, tmp_path, 600)
        text = logs(tmp_path / "logs")
        assert "and saved a checkpoint" in text
        assert "start 1, nodes" in text
        assert "resuming after step" in text
        wait(node, node.submit(tmp_path / "undisturbed.sh"), tmp_path, 600)
    one, two = (tmp_path / name for name in ("preempted", "undisturbed"))
    assert command.losses(one) == command.losses(two), logs(tmp_path / "logs")
    command.assert_same_state(one, two)
