"""Job scripts of SLURM as text, and run by bash with programs that take the place of SLURM's."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sa1b.cluster.slurm import Site, doctor_script, reshard_script, train_script
from sa1b.console import command
from tests.cli.verb import runner

slurm = runner("slurm")
ARGUMENTS = ["--out", "it's a $HOME run", "--data.root", "s3://bucket/a b", "--data.view", '"x"']

PROGRAMS = {
    "scontrol": 'if [ "$1" = show ]; then echo node7; else echo "$*" >> requeued; fi',
    "scancel": 'echo "$*" >> cancelled; kill -USR1 "$(cat pid)"',  # the process that srun started
    # The options of srun come before the program.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; echo $$ > pid; exec "$@"',
    "torchrun": f'{sys.executable} "$(dirname "$0")/torchrun.py" "$@"; exit $?',
}
TORCHRUN = """
import json, os, signal, sys, time
ignored = all(signal.getsignal(one) is signal.SIG_IGN for one in (signal.SIGUSR1, signal.SIGUSR2))
stopped = []
signal.signal(signal.SIGUSR1, lambda *_: stopped.append(True))
with open("started.partial", "w") as file:
    json.dump({"words": sys.argv[1:], "ignored": ignored, "threads": os.environ["OMP_NUM_THREADS"]}, file)
os.rename("started.partial", "started")
while os.path.exists("waits") and not stopped:
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "torchrun.py").write_text(TORCHRUN)
    return folder


def start(script: str, folder: Path, programs: Path, **variables: str) -> subprocess.Popen[str]:
    (folder / "job.sh").write_text(script)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12345",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
        **variables,
    }
    return subprocess.Popen(
        ["bash", "job.sh"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))


@pytest.mark.parametrize("arguments", [[], ARGUMENTS])
def test_scripts_are_valid(arguments: Sequence[str], tmp_path: Path) -> None:
    site = Site("p", "a", "1:00:00", 3, "7G", "n", "my logs", ("export X='y z'",), ("--qos=high",))
    for script in (
        reshard_script(arguments, site, tasks=4, workers=2),
        train_script(arguments, site, nodes=2, gpus=8, grace=60),
        train_script(arguments, Site(), nodes=1, gpus=0, grace=60),
        doctor_script(arguments, site, nodes=2, gpus=8),
        doctor_script(arguments, Site(), nodes=1, gpus=0),
    ):
        (tmp_path / "job.sh").write_text(script)
        subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, check=True)
    found = options(train_script(arguments, site, nodes=2, gpus=8, grace=60))
    assert found.items() >= {
        "partition": "p", "account": "a", "time": "1:00:00", "cpus-per-task": "3", "mem": "7G",
        "job-name": "n", "nodes": "2", "gpus-per-node": "8", "signal": "B:USR1@60", "requeue": "",
        "qos": "high", "output": '"my logs/%x-%j.log"',
    }.items()  # fmt: skip
    assert options(reshard_script(arguments, site, tasks=4, workers=2))["array"] == "0-3"


def test_the_ranks_get_the_arguments_unchanged_and_can_be_asked_to_stop(
    tmp_path: Path, programs: Path
) -> None:
    script = train_script(ARGUMENTS, Site(logs="my logs"), nodes=2, gpus=4, grace=60)
    job = start(script, tmp_path, programs)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    started = json.loads((tmp_path / "started").read_text())
    words = started["words"]
    assert words[words.index("-m") :] == ["-m", "sa1b.train", *ARGUMENTS]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node7:32345", "--rdzv-id=12345.0"} < set(
        words
    )
    assert "--log-dir=my logs/ranks-12345" in words
    assert started["ignored"] is True  # by torchrun, until a rank handles the signal
    assert started["threads"] == "1"
    assert "SLURM_JOB_ID=12345" in output
    assert not (tmp_path / "requeued").exists()


def test_the_signal_before_the_time_limit_queues_the_job_again_after_a_checkpoint(
    tmp_path: Path, programs: Path
) -> None:
    (tmp_path / "waits").touch()
    job = start(train_script([], Site(), nodes=1, gpus=1, grace=60), tmp_path, programs)
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.01)
    os.kill(
        int((tmp_path / "pid").read_text()), signal.SIGUSR2
    )  # asks the ranks for a table and ends nothing
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert (tmp_path / "cancelled").read_text() == "--signal=USR1 12345\n"
    assert (tmp_path / "requeued").read_text() == "requeue 12345\n"


@pytest.mark.parametrize("signalled", [False, True])
def test_a_failed_training_is_not_queued_again(tmp_path: Path, programs: Path, signalled: bool) -> None:
    if signalled:
        (tmp_path / "waits").touch()
    job = start(train_script([], Site(), nodes=1, gpus=1, grace=60), tmp_path, programs, ENDS_WITH="7")
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    if signalled:
        job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == 7
    assert not (tmp_path / "requeued").exists()


def test_every_rank_of_every_node_is_checked_with_the_arguments_unchanged(
    tmp_path: Path, programs: Path
) -> None:
    # A rank writes what it was given; one of them fails.
    (programs / "sa1b").write_text(
        "#!/bin/bash\n"
        'printf "%s\\n" "$LOCAL_RANK/$LOCAL_WORLD_SIZE/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" "$@" > "rank-$RANK"\n'
        '[ "$RANK" != 7 ]\n'
    )
    (programs / "sa1b").chmod(0o755)
    # srun runs the program once on each of two nodes.
    (programs / "srun").write_text(
        '#!/bin/bash\nwhile [ "${1#--}" != "$1" ]; do shift; done\n'
        'SLURM_NODEID=0 "$@"; first=$?\nSLURM_NODEID=1 "$@"; second=$?\n'
        "exit $((first > second ? first : second))\n"
    )
    script = doctor_script(ARGUMENTS, Site(), nodes=2, gpus=4)
    script = script.replace(f"{command('doctor')} ", "sa1b doctor ")
    job = start(script, tmp_path, programs)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 1, output
    assert "SLURM_JOB_ID=12345" in output
    found = {path.name: path.read_text().splitlines() for path in tmp_path.glob("rank-*")}
    assert sorted(found) == [f"rank-{rank}" for rank in range(8)]
    for rank in range(8):
        assert found[f"rank-{rank}"] == [f"{rank % 4}/4/8 node7:32345", "doctor", *ARGUMENTS]


def test_a_command_of_setup_that_fails_ends_the_job(tmp_path: Path, programs: Path) -> None:
    job = start(train_script([], Site(setup=("false",)), nodes=1, gpus=1, grace=60), tmp_path, programs)
    job.communicate(timeout=60)
    assert job.returncode == 1
    assert not (tmp_path / "started").exists()


def test_commands_of_setup_may_read_variables_that_are_not_set(tmp_path: Path, programs: Path) -> None:
    (tmp_path / "activate").write_text('if [ -z "$NOT_SET" ]; then export FROM_SETUP=1; fi\n')
    site = Site(setup=(". ./activate", "echo from setup: $FROM_SETUP"))
    job = start(train_script([], site, nodes=1, gpus=1, grace=60), tmp_path, programs)
    assert "from setup: 1" in job.communicate(timeout=60)[0]
    assert job.returncode == 0


def test_a_folder_of_logs_that_does_not_exist_is_noted(tmp_path: Path) -> None:
    for logs, note in ((tmp_path, ""), (tmp_path / "100% of", f"note: --logs {tmp_path}/100% of: no such")):
        done = slurm("reshard", "--logs", logs, "downloads", "--out", "x")
        assert done.returncode == 0
        assert done.stderr.startswith(note)
        assert bool(done.stderr) == bool(note)
    assert options(done.stdout)["output"] == f'"{tmp_path}/100%% of/%x-%A_%a.log"'


def test_flags_are_checked_when_the_script_is_printed() -> None:
    done = slurm("reshard", "--tasks", "3", "downloads", "--out", "a b", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert options(done.stdout)["array"] == "0-2"
    assert "downloads --out 'a b' --workers 2" in done.stdout
    for words, message in (
        (["reshard", "downloads", "--outt", "x"], "--outt"),
        (["reshard", "downloads", "--out", "x", "--task", "0/2"], "--task: is not for an array job"),
        (["reshard", "--tasks", "5000", "downloads", "--out", "x"], "--tasks 5000: must be at most 1000"),
        (["reshard", "--tasks", "0", "downloads", "--out", "x"], "--tasks 0: must be at least 1"),
        (["reshard", "--out", "x"], "SOURCE or --links: missing"),
        (["reshard", "--name", "a\nb", "d", "--out", "x"], "--name 'a\\nb': cannot be an option of sbatch"),
        (["reshard", "--logs", 'a"b', "d", "--out", "x"], "--logs 'a\"b': cannot be an option of sbatch"),
        (["reshard", "--time", "", "d", "--out", "x"], "--time '': cannot be an option of sbatch"),
        (["reshard", "--sbatch=qos=high", "d", "--out", "x"], "write it as --sbatch=--qos=high"),
        (["train", "--data.rot", "x"], "--data.rot"),
        (["doctor", "x", "--rot"], "--rot: no such flag"),
        (["doctor", "x", "--seconds", "0"], "--seconds 0: must be from 0.1 to 600"),
        (["doctor", "x", "--only", "disk"], "--only disk: no such check"),
        (["traim"], "traim"),
    ):
        done = slurm(*words)
        assert done.returncode == 2, words
        assert message in done.stderr
        assert done.stdout == ""
