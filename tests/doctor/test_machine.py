"""Limits of a machine: each check on a machine with this fault fails and says what to change."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sa1b.programs.doctor import machine
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding
from tests.disks import small_disk


def only(findings: Iterator[Finding]) -> Finding:
    (one,) = findings
    assert bool(one.remedy) == (one.state != "ok")
    return one


@contextmanager
def limit(kind: int, soft: int) -> Iterator[None]:
    """Lower a limit of this process for a while."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(("mebibytes", "state"), [(1, "failed"), (64, "failed"), (100, "warning")])
def test_a_small_shared_memory(tmp_path: Path, mebibytes: int, state: str) -> None:
    (tmp_path / "dev").mkdir()
    with small_disk(tmp_path / "dev/shm", mebibytes << 20):
        found = only(machine.shared_memory(RankProcess(system=tmp_path)))
    assert found.state == state
    assert f"{mebibytes} MiB free of {mebibytes} MiB" in found.figure
    assert "--shm-size" in found.remedy
    assert found.values["total_bytes"] == mebibytes << 20


def test_a_shared_memory_that_ended_processes_have_filled(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    with small_disk(tmp_path / "dev/shm", (1 << 30) + (8 << 20)) as folder:
        with (folder / "left").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 16 << 20)
        found = only(machine.shared_memory(RankProcess(system=tmp_path)))
    assert found.state == "warning"
    assert "Remove files of ended processes" in found.remedy


def test_a_shared_memory_that_does_not_exist(tmp_path: Path) -> None:
    found = only(machine.shared_memory(RankProcess(system=tmp_path)))
    assert found.state == "failed"
    assert "No such file or directory" in found.figure


def test_a_low_limit_of_open_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with limit(resource.RLIMIT_NOFILE, 300):
        found = only(machine.open_files(RankProcess()))
    assert found.state == "failed"
    assert found.figure == "limit 300, 516 needed"
    assert found.remedy == f"Run `ulimit -n {min(hard, 4096) if hard > 0 else 4096}` first"
    with limit(resource.RLIMIT_NOFILE, 1024):
        assert only(machine.open_files(RankProcess())).state == "ok"
        found = only(machine.open_files(RankProcess(world_size=512)))  # sockets to so many ranks
    assert (found.state, found.values["needed"]) == ("failed", 2560)


def test_a_low_limit_of_locked_memory_matters_to_infiniband_only(tmp_path: Path) -> None:
    with limit(resource.RLIMIT_MEMLOCK, 64 << 10):
        assert only(machine.locked_memory(RankProcess(system=tmp_path))).state == "ok"
        port = "sys/class/infiniband/mlx5_3/ports/1"
        write(tmp_path, {f"{port}/state": "4: ACTIVE\n", f"{port}/link_layer": "InfiniBand\n"})
        found = only(machine.locked_memory(RankProcess(system=tmp_path)))
    assert found.state == "failed"
    assert "limit 64 KiB" in found.figure
    assert "mlx5_3:1" in found.figure
    assert "memlock=-1" in found.remedy


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [*os.environ]:
        if name.startswith(("SLURM_", "TORCHELASTIC_", "LOCAL_WORLD_SIZE")):
            monkeypatch.delenv(name)
    return monkeypatch


def test_a_cpu_quota_that_the_threads_or_the_ranks_exceed(alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quota = {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "100000 100000\n"}
    process = RankProcess(system=write(tmp_path, quota))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        found = only(machine.cpus(process))
        assert found.state == "warning"
        assert "quota 1.0" in found.figure
        assert "1 x 3 threads compete for 1 CPU" in found.figure
        assert found.remedy == "Set OMP_NUM_THREADS=1 for each rank"
        alone.setenv("LOCAL_WORLD_SIZE", "2")
        found = only(machine.cpus(RankProcess(system=tmp_path, local_world_size=2, world_size=2)))
        assert "2 ranks share 1 CPU" in found.figure
        torch.set_num_threads(1)
        alone.delenv("LOCAL_WORLD_SIZE")
        assert only(machine.cpus(process)).state == "ok"
        gpu = RankProcess(system=tmp_path, device=torch.device("cuda", 0))
        assert "1 CPU for a GPU" in only(machine.cpus(gpu)).figure
    finally:
        torch.set_num_threads(threads)


MEMORY = {
    "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n",
    "proc/self/cgroup": "0::/job/step\n",
}


@pytest.mark.parametrize(("gibibytes", "state"), [(2, "failed"), (8, "warning"), (32, "ok")])
def test_a_memory_limit_of_the_job(tmp_path: Path, gibibytes: int, state: str) -> None:
    limits = {
        "sys/fs/cgroup/job/memory.max": f"{gibibytes << 30}\n",
        "sys/fs/cgroup/job/step/memory.max": "max",
    }
    write(tmp_path, {**MEMORY, **limits})
    found = only(machine.memory(RankProcess(system=tmp_path, world_size=4, local_world_size=4)))
    assert found.state == state
    assert f"limit of the cgroup {gibibytes}" in found.figure
    assert found.values["per_rank_bytes"] == (gibibytes << 30) / 4


def test_a_memory_limit_of_cgroups_of_version_1(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/job/memory.limit_in_bytes"
    lines = {"proc/self/cgroup": "5:memory:/job\n", group: f"{1 << 29}"}
    found = only(machine.memory(RankProcess(system=write(tmp_path, {**MEMORY, **lines}))))
    assert (found.state, found.values["limit_bytes"]) == ("failed", 1 << 29)
    (tmp_path / group).write_text("9223372036854771712\n")  # no limit
    assert only(machine.memory(RankProcess(system=tmp_path))).state == "ok"


def test_a_clock_of_the_past_and_a_slow_one(tmp_path: Path) -> None:
    found = only(machine.clock(RankProcess(system=tmp_path), now=86_400.0 * 365))
    assert found.state == "failed"
    assert found.figure.startswith("1971-01-01")
    assert "before the installation of sa1b" in found.figure
    source = "sys/devices/system/clocksource/clocksource0/current_clocksource"
    found = only(machine.clock(RankProcess(system=write(tmp_path, {source: "hpet\n"}))))
    assert found.state == "warning"
    assert "hpet" in found.figure
    (tmp_path / source).write_text("tsc\n")
    assert only(machine.clock(RankProcess(system=tmp_path))).state == "ok"
