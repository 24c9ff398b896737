"""The CPUs that a process may use: affinity mask, cgroup quota, Slurm's allotment, shared by local ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sa1b import workers
from sa1b.workers import available_cpus

VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "SLURM_CPUS_PER_TASK",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_ON_NODE",
)
PROGRAM = "from sa1b.workers import available_cpus; print(available_cpus())"
mask_needed = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 64 CPUs and without quotas or variables; returns an empty root for its files."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Process -> CPUs of its affinity mask, 0 for this one; 64 unless a test changes it."""
    masks = {0: 64}
    monkeypatch.setattr(workers, "_affinity", lambda process: masks.get(process, masks[0]))
    return masks


def cgroup(root: Path, lines: str, files: dict[str, str]) -> None:
    for name, text in {"proc/self/cgroup": lines, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@mask_needed
@pytest.mark.parametrize("ranks", [None, 1, 2, 5])
def test_the_affinity_mask_counts_and_local_ranks_share_it(ranks: int | None) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    environment = {**os.environ, **({} if ranks is None else {"LOCAL_WORLD_SIZE": str(ranks)})}
    command = ["taskset", "-c", ",".join(map(str, cpus)), sys.executable, "-c", PROGRAM]
    found = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) == max(1, len(cpus) // (ranks or 1))


@mask_needed
def test_a_rank_that_torchrun_bound_to_its_own_cpus_does_not_divide_them_again() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 4:
        pytest.skip("needs 4 CPUs")
    bound = f"import os; os.sched_setaffinity(0, {set(cpus[:2])}); {PROGRAM}"
    launcher = (
        f"import os, subprocess, sys; os.sched_setaffinity(0, {set(cpus[:4])}); "
        f"subprocess.run([sys.executable, '-c', {bound!r}], check=True)"
    )
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    found = subprocess.run(
        [sys.executable, "-c", launcher],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(found.stdout) == 2


@pytest.mark.parametrize(
    ("variables", "cpus"),
    [
        ({}, 64),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_CPUS_PER_TASK": "12"}, 12),
        # With one task per node that runs torchrun, the ranks share the CPUs of the task.
        ({"SLURM_CPUS_PER_TASK": "48", "SLURM_NTASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 6),
        # With a task for each rank, SLURM_CPUS_PER_TASK is the number of CPUs of one rank.
        ({"SLURM_CPUS_PER_TASK": "6", "SLURM_NTASKS_PER_NODE": "8"}, 6),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_ON_NODE": "32"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "8", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"SLURM_CPUS_PER_TASK": "128"}, 64),
        ({"LOCAL_WORLD_SIZE": "100"}, 1),
        ({"LOCAL_WORLD_SIZE": "0", "SLURM_CPUS_PER_TASK": "(null)"}, 64),
    ],
)
def test_slurm_and_torchrun_are_divided_once(
    variables: dict[str, str],
    cpus: int,
    machine: dict[int, int],
    plain: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert available_cpus(plain) == cpus


def test_a_slurm_task_that_is_bound_to_its_cpus_does_not_divide_them_again(
    machine: dict[int, int], plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine[0] = 8
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "64")
    assert available_cpus(plain) == 8


@pytest.mark.parametrize(
    ("lines", "files", "cpus"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ("0::/job/step\n", {"sys/fs/cgroup/job/cpu.max": "800000 100000\n"}, 8),
        # The path on the host, seen from a container.
        ("0::/kubepods/pod1\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ("0::/../other\n", {"sys/fs/other/cpu.max": "200000 100000\n"}, 64),
        (
            "5:cpu,cpuacct:/docker/1\n0::/\n",
            {
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/1/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            "5:cpuacct,cpu:/\n",
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "1600000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        ("5:cpu:/\n", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}, 64),
        ("7:cpuset:/\n", {"sys/fs/cgroup/cpuset/cpu.max": "100000 100000\n"}, 64),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "unreadable\n"}, 64),
    ],
)
def test_the_quota_of_a_cgroup_counts(
    lines: str, files: dict[str, str], cpus: int, machine: dict[int, int], plain: Path
) -> None:
    cgroup(plain, lines, files)
    assert available_cpus(plain) == cpus


def test_ranks_share_a_quota(machine: dict[int, int], plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup(plain, "0::/\n", {"sys/fs/cgroup/cpu.max": "800000 100000\n"})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert available_cpus(plain) == 2
