"""Job scripts of SLURM as text, and run by bash with programs that take the place of SLURM's."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sa1b.console import command
from sa1b.programs.cluster import verb_slurm as cli
from sa1b.programs.cluster.slurm import Site, doctor_script, reshard_script, train_script
from tests.cli.verb import called
from tests.processes import REPOSITORY

slurm = called("slurm")
TRAIN = ["--preset", "vit_b", "--data.root", "shards", "--out", "run"]
INHERITED = "head='' port='' ranks='' preempted=''"  # from the script, in the shell of a node
DDP = [*TRAIN, "--parallel.mode", "ddp"]
ARGUMENTS = ["--out", "it's a $HOME run", "--data.root", "s3://bucket/a b", "--data.view", '"x"']

PROGRAMS = {
    # As with many nodes, scontrol writes more than a pipe takes, and fails if its reader ends.
    "scontrol": 'case "$1 $2" in "show job") echo "JobState=${STATE:-RUNNING}" ;; '
    'show*) printf "node%d\\n" {7..20000} ;; *) echo "$*" >> requeued ;; esac',
    "scancel": 'echo "$*" >> cancelled; kill -USR1 "$(cat pid)"',  # the process that srun started
    # The options of srun come before the program.
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; echo $$ > pid; exec "$@"',
    "torchrun": f'{sys.executable} "$(dirname "$0")/torchrun.py" "$@"; exit $?',
}
TORCHRUN = """
import json, os, signal, sys, time
ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
stopped = []
signal.signal(signal.SIGUSR1, lambda *_: stopped.append(True))
with open("started.partial", "w") as file:
    threads = os.environ["OMP_NUM_THREADS"]
    json.dump({"words": sys.argv[1:], "ignored": ignored, "threads": threads, "pid": os.getpid()}, file)
os.rename("started.partial", "started")
while os.path.exists("waits") and not stopped:
    time.sleep(0.01)
time.sleep(0.2)
if os.path.exists("ends"):
    os.makedirs(os.path.dirname(os.environ["SA1B_FINISHED"]))
    open(os.environ["SA1B_FINISHED"], "w").close()
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


def scripts(arguments: Sequence[str], site: Site) -> list[str]:
    return [
        reshard_script(arguments, site, tasks=4, workers=2),
        reshard_script(arguments, site, tasks=4, workers=2, accepted=(3, 4)),
        train_script(arguments, site, nodes=2, gpus=8),
        doctor_script(arguments, site, nodes=2, gpus=8),
    ]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck: not in PATH")
@pytest.mark.parametrize("arguments", [[], ARGUMENTS])
def test_shellcheck_finds_nothing_in_the_scripts(arguments: Sequence[str], tmp_path: Path) -> None:
    texts = [*scripts(arguments, Site(requeue=2)), *scripts(arguments, Site(logs="my logs"))]
    texts.append((REPOSITORY / ".ci" / "run").read_text())
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.sh").write_text(text)
        if node := re.search(r"<<'NODE'\n(.*)\nNODE", text, re.DOTALL):  # to shellcheck, it is data
            inherited = INHERITED if "$head" in node[1] else ""
            (tmp_path / f"{number}-node.sh").write_text(f"#!/bin/bash\n{inherited}\n{node[1]}\n")
    found = sorted(path.name for path in tmp_path.iterdir())
    assert sum("node" in name for name in found) == 4
    done = subprocess.run(["shellcheck", *found], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [[], ARGUMENTS])
def test_scripts_are_valid(arguments: Sequence[str], tmp_path: Path) -> None:
    site = Site("p", "a", "1:00:00", 3, "7G", "n", "my logs", ("export X='y z'",), ("--qos=high",), 60, 2)
    for script in (*scripts(arguments, site), *scripts(arguments, Site())):
        (tmp_path / "job.sh").write_text(script)
        subprocess.run(["bash", "-n", "job.sh"], cwd=tmp_path, check=True)
    found = options(train_script(arguments, site, nodes=2, gpus=8))
    assert found.items() >= {
        "partition": "p", "account": "a", "time": "1:00:00", "cpus-per-task": "3", "mem": "7G",
        "job-name": "n", "nodes": "2", "gpus-per-node": "8", "signal": "B:USR1@60", "requeue": "",
        "qos": "high", "output": '"my logs/%x-%j.log"',
    }.items()  # fmt: skip
    assert options(reshard_script(arguments, site, tasks=4, workers=2))["array"] == "0-3"


def test_the_ranks_get_the_arguments_unchanged_and_can_be_asked_to_stop(
    tmp_path: Path, programs: Path
) -> None:
    script = train_script(ARGUMENTS, Site(logs="my logs"), nodes=2, gpus=4)
    job = start(script, tmp_path, programs)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    started = json.loads((tmp_path / "started").read_text())
    words = started["words"]
    assert words[words.index("-m") :] == ["-m", "sa1b.train", *ARGUMENTS]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node7:20345", "--rdzv-id=12345.0"} < set(
        words
    )
    assert "--log-dir=my logs/ranks-12345" in words
    assert started["ignored"] is True  # by torchrun, until a rank handles the signal
    assert started["threads"] == "1"
    assert "SLURM_JOB_ID=12345" in output
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("ends", [False, True])
def test_the_signal_before_the_time_limit_queues_the_job_again_unless_the_run_has_finished(
    tmp_path: Path, programs: Path, ends: bool
) -> None:
    (tmp_path / "waits").touch()
    if ends:
        (tmp_path / "ends").touch()
    job = start(train_script([], Site(), nodes=1, gpus=1), tmp_path, programs)
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert (tmp_path / "cancelled").read_text() == "--signal=USR1 12345\n"
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("" if ends else "requeue 12345\n")


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_a_preempted_job_waits_for_its_ranks_and_is_queued_again_unless_it_was_cancelled(
    tmp_path: Path, programs: Path, state: str
) -> None:
    (tmp_path / "waits").touch()
    job = start(train_script([], Site(), nodes=1, gpus=1), tmp_path, programs, STATE=state)
    while not (tmp_path / "started").exists():
        assert job.poll() is None
        time.sleep(0.01)
    # SLURM sends SIGTERM to all processes of the nodes and not to the script.
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    preempted = tmp_path / "ranks-12345" / "preempted-0"
    while not preempted.exists():
        assert job.poll() is None
        time.sleep(0.01)
    os.kill(json.loads((tmp_path / "started").read_text())["pid"], signal.SIGTERM)
    output = job.communicate(timeout=60)[0]
    assert job.returncode == 0, output
    assert (tmp_path / "requeued").exists() == (state == "RUNNING")


@pytest.mark.parametrize("signalled", [False, True])
def test_a_failed_training_is_not_queued_again(tmp_path: Path, programs: Path, signalled: bool) -> None:
    if signalled:
        (tmp_path / "waits").touch()
    job = start(train_script([], Site(), nodes=1, gpus=1), tmp_path, programs, ENDS_WITH="7")
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    if signalled:
        job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == 7
    assert not (tmp_path / "requeued").exists()


def test_a_failed_training_is_queued_again_as_often_as_demanded(tmp_path: Path, programs: Path) -> None:
    script = train_script([], Site(requeue=2), nodes=1, gpus=1)
    for start_number in (1, 2, 3):
        job = start(script, tmp_path, programs, ENDS_WITH="7")
        job.communicate(timeout=60)
        assert job.returncode == 7
        assert len((tmp_path / "requeued").read_text().splitlines()) == min(start_number, 2)


@pytest.mark.parametrize(
    ("ends", "site", "accepted", "code", "requeued"),
    [
        ("exit 0", Site(requeue=1), (), 0, ""),
        ("exit 3", Site(), (3,), 0, ""),
        ("exit 3", Site(requeue=1), (4, 3), 0, ""),
        ("exit 3", Site(requeue=1), (4,), 3, "requeue 12_5\n"),
        ("kill -9 $$", Site(requeue=1), (), 137, "requeue 12_5\n"),
        ("kill -9 $$", Site(requeue=0), (3,), 137, ""),
        ("touch waits; exec sleep 60", Site(requeue=1), (), 143, "requeue 12_5\n"),  # the time limit
    ],
)
def test_an_array_task_may_end_with_accepted_codes_and_be_queued_again(
    tmp_path: Path, programs: Path, ends: str, site: Site, accepted: tuple[int, ...], code: int, requeued: str
) -> None:
    (programs / "sa1b").write_text(f'#!/bin/bash\necho "$@"\n{ends}\n')
    (programs / "sa1b").chmod(0o755)
    script = reshard_script(["downloads"], site, tasks=9, workers=1, accepted=accepted)
    script = script.replace(f"{command('reshard')} ", "sa1b reshard ")
    for number, again in enumerate((requeued, "")):  # the second start is the last that is demanded
        (tmp_path / "requeued").write_text("")
        variables = {
            "SLURM_ARRAY_JOB_ID": "12",
            "SLURM_ARRAY_TASK_ID": "5",
            "SLURM_RESTART_COUNT": str(number),
        }
        job = start(script, tmp_path, programs, **variables)
        if "waits" in ends:
            while not (tmp_path / "waits").exists():
                assert job.poll() is None
                time.sleep(0.01)
            (tmp_path / "waits").unlink()
            job.send_signal(signal.SIGUSR1)
        output = job.communicate(timeout=60)[0]
        assert job.returncode == code
        assert "reshard downloads --task 5/9 --finish" in output
        assert (tmp_path / "requeued").read_text() == again


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
        assert found[f"rank-{rank}"] == [f"{rank % 4}/4/8 node7:20345", "doctor", *ARGUMENTS]


def test_a_command_of_setup_that_fails_ends_the_job(tmp_path: Path, programs: Path) -> None:
    job = start(train_script([], Site(setup=("false",)), nodes=1, gpus=1), tmp_path, programs)
    job.communicate(timeout=60)
    assert job.returncode == 1
    assert not (tmp_path / "started").exists()


def test_commands_of_setup_may_read_variables_that_are_not_set(tmp_path: Path, programs: Path) -> None:
    (tmp_path / "activate").write_text('if [ -z "$NOT_SET" ]; then export FROM_SETUP=1; fi\n')
    site = Site(setup=(". ./activate", "echo from setup: $FROM_SETUP"))
    job = start(train_script([], site, nodes=1, gpus=1), tmp_path, programs)
    assert "from setup: 1" in job.communicate(timeout=60)[0]
    assert job.returncode == 0


def test_a_folder_of_logs_that_does_not_exist_is_noted(tmp_path: Path) -> None:
    for logs, note in ((tmp_path, ""), (tmp_path / "100% of", f"note: --logs {tmp_path}/100% of: no such")):
        done = slurm("reshard", "--logs", logs, "downloads", "--out", "x")
        assert done.returncode == 0
        assert done.stderr.startswith(note)
        assert bool(done.stderr) == bool(note)
    assert options(done.stdout)["output"] == f'"{tmp_path}/100%% of/%x-%A_%a.log"'


def test_the_examples_of_the_help_print_a_script(tmp_path: Path) -> None:
    assert cli.__doc__ is not None
    text = re.sub(r"\n {12,}", " ", cli.__doc__.partition("\n\nFlags")[0])
    examples = re.findall(r"sa1b slurm (.*) > job.sh", text)
    assert [one.split()[0] for one in examples] == ["reshard", "doctor", "train"]
    for one in examples:
        done = slurm(*one.split())
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""


def test_a_note_says_that_replicas_do_not_fit_the_ranks() -> None:
    done = slurm("train", "--nodes", "4", *TRAIN, "--parallel.mode", "fsdp", "--parallel.replicas", "3")
    assert done.returncode == 0
    assert done.stderr.startswith(
        "--parallel.replicas 3: does not fit 32 ranks, so it is 2, with 16 ranks for"
    )


def test_every_form_of_a_time_and_a_memory_of_slurm_is_taken() -> None:
    assert [
        cli._seconds(one)
        for one in ("90", "90:30", "1:30:15", "2-1", "2-1:30", "2-1:30:15", "0", "UNLIMITED", None)
    ] == [5400, 5430, 5415, 176400, 178200, 178215, None, None, None]
    for memory in ("0", "2048", "2G", "2g", "1T", "2097152K", None):
        cli._check_memory(memory, 2, "rank", 1 << 30)


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
        (["reshard", "--logs", "http://u:PASS@h/x", "d", "--out", "x"], "--logs http:/h/x: must be a path"),
        (["reshard", "--time", "", "d", "--out", "x"], "--time '': cannot be an option of sbatch"),
        (["reshard", "--sbatch=qos=high", "d", "--out", "x"], "write it as --sbatch=--qos=high"),
        (
            ["reshard", "--time", "banana", "d", "--out", "x"],
            "--time banana: must be minutes, such as 90, or",
        ),
        (["reshard", "--time", "1:2:3:4", "d", "--out", "x"], "--time 1:2:3:4: must be minutes"),
        (
            ["reshard", "--memory", "lots", "d", "--out", "x"],
            "--memory lots: must be a number with K, M, G or T",
        ),
        (["reshard", "--memory", "1G", "d", "--out", "x", "--workers", "2"], "for each worker of a node, of"),
        (
            ["reshard", "--nodes", "2", "d", "--out", "x"],
            "--nodes: is for doctor and train, not reshard; omit it",
        ),
        (["reshard", "--accept", "0", "d", "--out", "x"], "--accept 0: must be from 1 to 255"),
        (["doctor", "--memory", "7G", "d"], "pass at least 8G, or start fewer"),
        (["train", "--grace", "70000", *DDP], "--grace 70000: must be from 1 to 65535"),
        (["doctor", "--requeue", "2", "d"], "--requeue: is for reshard and train, not doctor"),
        (["train", "--data.rot", "x"], "--data.rot"),
        (
            ["train", *TRAIN, "--parallel.mode", "none"],
            "--parallel.mode none: is for one process, this run has 8; pass",
        ),
        (["train", "--accept", "3", *TRAIN], "--accept: is for reshard, not train; omit it"),
        (["train", "--time", "2", *DDP], "--grace 120: is not shorter than --time 2; lower it"),
        (
            ["train", "--memory", "7168M", *DDP],
            "--memory 7168M: is less than 1024 MiB for each rank of a node",
        ),
        (["train", *DDP, "--data.global-batch", "4"], "--data.global-batch 4: has 4 samples for 8 ranks"),
        (["train", *DDP, "--parallel.device", "cpu"], "--parallel.device cpu: would not use the 8 GPUs"),
        (
            ["train", "--gpus", "0", *TRAIN, "--parallel.device", "cuda"],
            "needs a GPU, and --gpus 0 requests none",
        ),
        (["doctor", "x", "--rot"], "--rot: no such flag"),
        (["doctor", "x", "--seconds", "0"], "--seconds 0: must be from 0.1 to 600"),
        (["doctor", "x", "--only", "disk"], "--only disk: must be one of"),
        (["traim"], "traim"),
    ):
        done = slurm(*words)
        assert done.returncode == 2, words
        assert message in done.stderr
        assert done.stdout == ""
