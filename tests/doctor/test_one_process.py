"""`sa1b doctor` in one process: each fault of a machine, its state, what is said about it and the remedy."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.cli.verb import called, runner
from tests.disks import small_disk
from tests.processes import REPOSITORY, Process
from tests.shards import tiny_source

doctor = runner("doctor")
HOST = socket.gethostname()
PATIENCE = 120  # seconds
COMMON = (
    *("versions", "device", "GPU state", "placement", "environment", "CPUs", "memory", "shared memory"),
    *("open files", "space", "dataset", "read rate", "rendezvous"),
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    sources = [tiny_source.write_source(folder / "sa_000001.tar", tiny_source.pairs(range(100, 112)))]
    return tiny_source.make_root(folder / "root", sources, tiny_source.ROOTS["plain"])


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "sa1b", "doctor", *map(str, words)]


def found(check: str, *words: object, before: tuple[str, ...] = (), **variables: str) -> list[dict[str, Any]]:
    """The findings of one check; `before`: the words before the command, such as those of another program."""
    run = subprocess.run if before else processes.run
    done = run(
        [*before, *command(*words, "--only", check.replace(" ", "-").lower(), "--json")],
        env={**os.environ, **variables}, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    document = json.loads(done.stdout)
    findings = [one for one in document["findings"] if one["check"] == check]
    assert all(bool(one["remedy"]) == (one["state"] != "ok") for one in findings)
    is_failed = "failed" in {one["state"] for one in findings}
    assert (done.returncode, document["exit_code"]) == (is_failed, is_failed)
    return findings


def only(*arguments: Any, **variables: Any) -> dict[str, Any]:
    (one,) = found(*arguments, **variables)
    return one


def test_one_process_runs_every_check(root: Path, tmp_path: Path) -> None:
    done = doctor(root, "--out", tmp_path / "run", "--seconds", 0.1, "--rate", 0.001, "--json")
    document = json.loads(done.stdout)
    assert done.returncode == document["exit_code"]
    states = {one["check"]: one["state"] for one in document["findings"]}
    assert [name for name in states if name in COMMON] == list(COMMON)
    good = ("versions", "placement", "environment", "dataset", "read rate")
    assert {name: states[name] for name in good} == dict.fromkeys(good, "ok")
    assert states["rendezvous"] == "skipped"
    assert done.stderr == ""
    assert not (tmp_path / "run").exists()


def test_checks_are_chosen_by_name_and_the_others_do_not_run() -> None:
    words = ("--only", "shared-memory", "--only", "open-files", "--only", "memory", "--skip", "memory")
    done = doctor(*words)
    assert done.returncode == 0, done.stdout
    rows = done.stdout.splitlines()
    assert rows[0] == f"1 process on {HOST}"
    assert [row[11:24].strip() for row in rows[1:3]] == ["shared memory", "open files"]
    assert rows[-1] == "2 ok"


def test_a_fault_is_an_exit_code_and_its_remedy_is_the_last_part() -> None:
    done = doctor("nowhere", "--only", "dataset", "--only", "read-rate")
    assert done.returncode == 1
    assert "  FAILED   dataset    nowhere: no dataset there\n" in done.stdout
    assert "  skipped  read rate  the check 'dataset' failed\n" in done.stdout
    assert "\nFailed:\n  dataset: Pass the --out folder of `" in done.stdout
    assert done.stdout.endswith("\n1 failed, 1 skipped\n")


def test_a_file_system_that_does_not_answer_is_named_and_stops_no_other_check(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "dataset.json")  # no process writes to it, so opening it never returns
    words = ("--timeout", 2, "--seconds", 0.1, *("--only", "dataset"), *("--only", "read-rate"))
    done = doctor(tmp_path, *words, "--only", "memory")
    assert done.returncode == 1
    assert "  FAILED   dataset    did not end within 1.4 s\n" in done.stdout
    assert "  skipped  read rate  the check 'dataset' failed\n" in done.stdout
    assert "  ok       memory " in done.stdout
    assert "A file system, a store or a driver does not answer" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seconds", "0"), "--seconds 0: must be from 0.1 to 600"),
        (("--timeout", "nan"), "--timeout nan: must be from 1 to 3600"),
        (("--rate", "-1"), "--rate -1: must be more than 0"),
        (("--only", "disk"), "--only disk: "),
        (("--skip", ""), "--skip : "),
        (("",), "argument 1: is empty; give it a value"),
        (("a", "b"), "b: one argument too many"),
        (("--rnig",), "--rnig: no such flag"),
    ],
)
def test_a_wrong_command_line(arguments: tuple[str, ...], message: str) -> None:
    done = called("doctor")(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3: must be from 0 to below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a whole number; torchrun sets it"),
        ({"LOCAL_RANK": "%q", "WORLD_SIZE": "2"}, "LOCAL_RANK=%q: must be a whole number; torchrun sets it"),
    ],
)
def test_variables_of_a_launcher_that_contradict_each_other(variables: dict[str, str], message: str) -> None:
    done = processes.run(command(), env={**os.environ, **variables}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_ctrl_c_prints_what_was_found(root: Path) -> None:
    with Process(
        command(root, "--seconds", 100), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if "read rate" in line:
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "interrupted" in output.splitlines()[0]
    assert "  ok       dataset" in output
    assert "interrupted" in errors
    assert "Traceback" not in errors


# The machine


@pytest.mark.parametrize(("mebibytes", "state"), [(64, "failed"), (100, "warning")])
def test_a_small_shared_memory(mebibytes: int, state: str) -> None:
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    mount = f'mount -t tmpfs -o size={mebibytes}m tmpfs /dev/shm && exec "$@"'
    one = only("shared memory", before=("unshare", "--mount", "sh", "-c", mount, "sh"))
    assert (one["state"], one["values"]["total_bytes"]) == (state, mebibytes << 20)
    assert f"{mebibytes} MiB free of {mebibytes} MiB" in one["figure"]
    assert "--shm-size" in one["remedy"]


def test_a_low_limit_of_open_files() -> None:
    one = only("open files", before=("sh", "-c", 'ulimit -Sn 300 && exec "$@"', "sh"))
    assert (one["state"], one["figure"]) == ("failed", "limit 300, 516 needed")
    assert "ulimit -n" in one["remedy"]
    assert only("open files", before=("sh", "-c", 'ulimit -Sn 1024 && exec "$@"', "sh"))["state"] == "ok"


def test_more_threads_than_cpus() -> None:
    (cpu, *_) = os.sched_getaffinity(0)
    bound = ("taskset", "-c", str(cpu))
    one = only("CPUs", before=bound, OMP_NUM_THREADS="3")
    assert one["state"] == "warning"
    assert "threads compete for 1 CPU" in one["figure"]
    assert "OMP_NUM_THREADS=1" in one["remedy"]
    assert only("CPUs", before=bound, OMP_NUM_THREADS="1")["state"] == "ok"
    one = only("CPUs", before=bound, OMP_NUM_THREADS="1", LOCAL_WORLD_SIZE="2")
    assert (one["state"], "2 ranks share 1 CPU" in one["figure"]) == ("warning", True)


def test_the_memory_of_a_rank() -> None:
    (one,) = found("memory", LOCAL_WORLD_SIZE="1000000")
    assert (one["state"], "fewer ranks" in one["remedy"]) == ("failed", True)


GPU = {
    "index": "0", "uuid": "GPU-aaa", "name": "NVIDIA H100", "ecc.errors.uncorrected.volatile.total": "0",
    "persistence_mode": "Enabled", "mig.mode.current": "Disabled", "compute_mode": "Default",
    "hw_slowdown": "Not Active", "memory.used": "5",
}  # fmt: skip
SMI = """#!{python}
import sys
(query,) = [word.partition("=")[2].split(",") for word in sys.argv if word.startswith("--query-gpu")]
names = [name.removeprefix({reasons!r} + ".") for name in query]
if {code} or any(name not in {gpus!r}[0] for name in names):
    print("Unable to determine the device handle" if {code} else f"{{query}} is not a valid field to query.")
    sys.exit({code} or 2)
for gpu in {gpus!r}:
    print(", ".join(gpu[name] for name in names))
"""


def asked(
    folder: Path,
    *gpus: dict[str, str],
    reasons: str = "clocks_event_reasons",
    code: int = 0,
    visible: str = "",
) -> list[dict[str, Any]]:
    """What is found if nvidia-smi says this of the GPUs; `reasons`: its name for why a GPU is slowed down."""
    text = SMI.format(python=sys.executable, gpus=gpus, reasons=reasons, code=code)
    (folder / "nvidia-smi").write_text(text)
    (folder / "nvidia-smi").chmod(0o755)
    return found("GPU state", PATH=f"{folder}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES=visible)


@pytest.mark.parametrize(
    ("field", "value", "state", "figure", "remedy"),
    [
        ("ecc.errors.uncorrected.volatile.total", "3", "failed", "3 uncorrected memory errors", "drain"),
        ("hw_slowdown", "Active", "warning", "slowed down by hardware", "temperature"),
        ("memory.used", "9000", "warning", "9000 MiB are in use", "End the other processes"),
    ],
)
def test_the_state_of_a_gpu(
    tmp_path: Path, field: str, value: str, state: str, figure: str, remedy: str
) -> None:
    (one,) = asked(tmp_path, GPU | {field: value})
    assert (one["state"], figure in one["figure"], remedy in one["remedy"]) == (state, True, True)
    assert one["figure"].startswith("GPU 0 (NVIDIA H100, GPU-aaa): ")


def test_a_good_gpu_those_of_other_jobs_and_an_older_driver(tmp_path: Path) -> None:
    broken = GPU | {"index": "1", "uuid": "GPU-bbb", "ecc.errors.uncorrected.volatile.total": "7"}
    assert [one["state"] for one in asked(tmp_path, GPU)] == ["ok"]
    assert [one["state"] for one in asked(tmp_path, GPU, reasons="clocks_throttle_reasons")] == ["ok"]
    for visible, states in (("", ["failed"]), ("0", ["ok"]), ("GPU-b", ["failed"])):
        assert [one["state"] for one in asked(tmp_path, GPU, broken, visible=visible)] == states


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    (one,) = asked(tmp_path, GPU, code=15)
    assert (one["state"], "Unable to determine the device" in one["figure"]) == ("failed", True)
    assert "drain" in one["remedy"]


def test_without_a_gpu_its_checks_are_skipped() -> None:
    assert only("GPU state", PATH="/nowhere")["state"] == "skipped"
    done = doctor("--kernels", "--json")
    assert done.returncode == 0, done.stderr
    assert {one["state"] for one in json.loads(done.stdout)["findings"]} == {"skipped"}


# The environment


@pytest.mark.parametrize(
    ("name", "value", "state", "remedy"),
    [
        ("NCCL_DEBUG", "WARN", "ok", ""),
        ("NCCL_DEBUG", "TRACE", "warning", "Set NCCL_DEBUG=WARN"),
        ("NCCL_P2P_DISABLE", "1", "warning", "Unset NCCL_P2P_DISABLE"),
        ("NCCL_P2P_DISABLE", "0", "ok", ""),
        ("NCCL_SHM_DISABLE", "1", "warning", "Unset NCCL_SHM_DISABLE"),
        ("NCCL_ALGO", "Ring", "warning", "Unset NCCL_ALGO"),
        ("NCCL_PROTO", "LL128", "warning", "Unset NCCL_PROTO"),
        ("NCCL_IB_TIMEOUT", "22", "ok", ""),
        ("NCCL_TIMEOUT", "1800", "warning", "Pass --parallel.timeout"),
        ("NCCL_SOCKET_IFNAME", "lo", "ok", ""),
        ("NCCL_SOCKET_IFNAME", "=l", "failed", "unset NCCL_SOCKET_IFNAME"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok", ""),
        ("GLOO_SOCKET_IFNAME", "ib77", "failed", "unset GLOO_SOCKET_IFNAME"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "warning", "Unset"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "warning", "Unset"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "ok", ""),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning", "set INFO"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", "Unset"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warning", "Unset"),
        ("NVIDIA_TF32_OVERRIDE", "0", "warning", "Unset"),
        ("NUMBA_DISABLE_JIT", "1", "warning", "Unset"),
    ],
)
def test_a_variable(name: str, value: str, state: str, remedy: str) -> None:
    words = [one for one in found("environment", **{name: value}) if name in one["figure"]]
    assert {"ok", state} >= {one["state"] for one in words} >= {state}
    assert any(f"{name}={value}" in one["figure"] and remedy in one["remedy"] for one in words)
    assert any(one["values"].get(name) == value for one in words)


def test_variables_of_a_configuration_file_of_nccl_count(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_P2P_DISABLE=1\n")
    states = [one["state"] for one in found("environment", HOME=str(tmp_path)) if "P2P" in one["figure"]]
    assert "warning" in states


def test_without_infiniband_it_may_be_disabled() -> None:
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this machine has InfiniBand")
    assert {one["state"] for one in found("environment", NCCL_IB_DISABLE="1")} == {"ok"}


# The dataset and the disk


def test_without_root_storage_is_skipped_with_a_hint() -> None:
    for check in ("dataset", "read rate"):
        one = only(check)
        assert (one["state"], one["figure"]) == ("skipped", "no ROOT was named")
        assert one["remedy"] == "Name the dataset directory: sa1b doctor ROOT"


@pytest.mark.parametrize(
    ("name", "figure", "remedy"),
    [
        ("missing", "missing: no dataset there", "Pass the --out folder of `"),
        ("sa_000001.tar", "sa_000001.tar: no dataset there", "Pass the --out folder of `"),
        ("foo://bucket/x", "foo://bucket/x: fsspec has no protocol 'foo'", "Pass a folder, or a URL"),
        ("http://127.0.0.1:9/data", "http://127.0.0.1:9/data", f"Check on {HOST} that the store runs"),
    ],
)
def test_a_root_that_is_no_dataset(root: Path, name: str, figure: str, remedy: str) -> None:
    one = only("dataset", name if "://" in name else root.parent / name, "--timeout", 2)
    assert one["state"] == "failed"
    assert figure in one["figure"]
    assert one["remedy"].startswith(remedy)


def test_a_damaged_sample(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "copy")
    for shard in copy.glob("*.tar"):
        shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    one = only("dataset", copy)
    assert (one["state"], "is damaged" in one["figure"], "verify" in one["remedy"]) == ("failed", True, True)


def test_sources_that_failed(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "copy")
    document = json.loads((copy / "dataset.json").read_text())
    document["failed"] = {"sa_000002": "truncated"}
    (copy / "dataset.json").write_text(json.dumps(document))
    one = only("dataset", copy)
    assert (one["state"], "failed sources: 1" in one["figure"]) == ("warning", True)


def test_a_dataset_without_images(tmp_path: Path) -> None:
    sources = [tiny_source.write_source(tmp_path / "sa_000001.tar", tiny_source.pairs(range(3)))]
    bare = tiny_source.make_root(tmp_path / "bare", sources, tiny_source.ROOTS["annotations_only"])
    one = only("dataset", bare)
    assert (one["state"], "--annotations-only" in one["figure"]) == ("failed", True)
    assert one["remedy"].startswith("Convert the sources")


def test_the_read_rate_is_compared_with_what_training_needs(root: Path) -> None:
    words = ("read rate", root, "--seconds", 0.2, "--rate")
    good, slow = only(*words, 0.001), only(*words, 999_999)
    assert (good["state"], slow["state"]) == ("ok", "failed")
    assert good["values"]["samples_per_second"] > 0
    assert "a rank trains 999,999 samples/s" in slow["figure"]
    assert "sa1b bench" in slow["remedy"]
    assert "a rank trains 1 sample/s" in only("read rate", root, "--seconds", 0.2)["figure"]  # on a CPU


def of_out(out: object) -> dict[str, Any]:
    first, temporary = found("space", "--out", out)
    assert temporary["figure"].startswith("temporary files in ")
    return first


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        one = of_out(disk / "run/not/yet")
        assert one["state"] == "failed"
        assert one["figure"].startswith(f"--out {disk}/run/not/yet: 4 MiB free")
        (disk / "filler").write_bytes(bytes(4 << 20))
        one = of_out(disk / "run")
        assert (one["state"], "No space left on device" in one["figure"]) == ("failed", True)
        assert not (disk / "run").exists()


def test_a_disk_without_free_files(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 << 30) as disk:
        subprocess.run(["mount", "-o", "remount,nr_inodes=500", str(disk)], check=True)
        one = of_out(disk)
    assert (one["state"], "more files" in one["figure"]) == ("failed", True)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        one = of_out(disk / "run")
    assert (one["state"], "Read-only file system" in one["figure"]) == ("failed", True)
    (tmp_path / "file").touch()
    assert "Not a directory" in of_out(tmp_path / "file/run")["figure"]
    assert of_out("s3://bucket/run")["state"] == "skipped"  # its free space is not known
