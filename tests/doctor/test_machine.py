"""Limits, versions and packages of a machine: each check of one with a fault says what to change."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import google_crc32c
import pytest
import torch

from sa1b.programs.doctor import machine
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding, agreement
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


REQUIREMENTS = (
    "torch>=2.11",
    "numpy>=2.0",
    'gcsfs>=2025.3; extra == "gcs"',
    'ray>=2.40; extra == "ray"',
    'triton>=3.6; platform_system == "Linux" and extra == "dev"',
    'sa1b[gcs,ray]; extra == "dev"',
)


def checked(root: str | None = None, **installed: str) -> list[Finding]:
    def version_of(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    return list(machine.packages(RankProcess(root=root), REQUIREMENTS, version_of))


def test_all_required_packages_are_there() -> None:
    (found,) = checked(torch="2.13.0+cpu", numpy="2.10.1")
    optional = "not installed, and optional: gcsfs (gcs), ray (ray)"
    assert (found.state, found.figure) == ("ok", f"2 required packages are installed; {optional}")
    assert found.values["not_installed"] == ["gcsfs", "ray", "triton"]


def test_a_package_that_is_missing_or_too_old() -> None:
    (found,) = checked(torch="2.9.1")
    assert found.state == "failed"
    assert found.figure == "torch 2.9.1 is older than 2.11; numpy is missing"
    assert found.remedy == "pip install --upgrade 'sa1b'"


def test_what_the_url_needs() -> None:
    (found,) = checked("gs://bucket/shards", torch="2.13.0", numpy="2.0")
    assert (found.state, found.figure) == ("failed", "gcsfs is missing (gs://bucket/shards needs it)")
    assert found.remedy == "pip install --upgrade 'sa1b[gcs]'"
    (found,) = checked("gs://bucket/shards", torch="2.13.0", numpy="2.0", gcsfs="2024.1")
    assert found.figure == "gcsfs 2024.1 is older than 2025.3"


def test_the_requirements_of_this_package_are_met() -> None:
    (found,) = machine.packages(RankProcess(root="s3://bucket"))
    assert found.state == "ok"
    assert {"torch", "numpy", "s3fs"} <= found.values["installed"].keys()


def test_a_checksum_without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google_crc32c, "implementation", "python")
    (_, found) = checked(torch="2.13.0", numpy="2.0")
    assert found.state == "warning"
    assert "google-crc32c has no compiled part" in found.figure


def test_a_build_without_a_back_end() -> None:
    good = {"gloo": True, "cuda": "12.8", "nccl": "2.27.3"}
    assert machine.lacking(good) == ""
    assert "with gloo" in machine.lacking(good | {"gloo": False})
    assert "with NCCL" in machine.lacking(good | {"nccl": None})
    assert machine.lacking({"gloo": True, "cuda": None, "nccl": None}) == ""


def test_the_driver_is_part_of_the_versions(tmp_path: Path) -> None:
    (found,) = machine.versions(RankProcess(system=tmp_path))
    assert (found.state, found.values["driver"]) == ("ok", None)
    assert found.values["torch"] in found.figure


def test_ranks_with_other_code_of_the_same_version_are_named(tmp_path: Path) -> None:
    (own,) = machine.versions(RankProcess(system=tmp_path))
    assert len(own.values["code"]) == 64

    def of(rank: int, code: str) -> Finding:
        return Finding("versions", "ok", "", "", (rank,), "h", {"sa1b": "1", "code": code})

    (found,) = agreement([of(0, "a" * 64), of(1, "b" * 64), of(2, "a" * 64)])
    assert (found.state, found.ranks) == ("failed", (1,))
    assert found.figure == f"code {'b' * 12}, and {'a' * 12} on ranks 0, 2"


def test_two_machines_with_one_host_name_are_named(tmp_path: Path) -> None:
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("1234-5678\n")
    assert machine.boot_id(RankProcess(system=tmp_path)) == "1234-5678"
    assert machine.boot_id(RankProcess(system=tmp_path / "none")) == ""

    def of(rank: int, machine: str) -> Finding:
        return Finding("versions", "ok", "", "", (rank,), "gpu", {"machine": machine})

    (found,) = agreement([of(0, "x"), of(1, "x"), of(2, "y")])
    assert (found.state, found.host) == ("warning", "gpu")
    assert found.figure == "2 machines have this host name: ranks 0-1, and rank 2"
    assert not list(agreement([of(0, "x"), of(1, "x"), of(2, "")]))


def test_versions_that_differ_name_ranks_and_hosts() -> None:
    def of(rank: int, **versions: str) -> Finding:
        return Finding("versions", "ok", "", "", (rank,), f"gpu-{rank // 2}", versions)

    good = [of(rank, torch="2.13.0", python="3.12.1", driver="580.1") for rank in range(4)]
    assert not list(agreement(good))
    found = list(
        agreement([*good, *(of(rank, torch="2.11.0", python="3.12.2", driver="580.1") for rank in (4, 5))])
    )
    assert [(one.state, one.figure, one.where()) for one in found] == [
        ("failed", "torch 2.11.0, and 2.13.0 on ranks 0-3", "ranks 4-5 on gpu-2"),
        ("warning", "python 3.12.2, and 3.12.1 on ranks 0-3", "ranks 4-5 on gpu-2"),
    ]
    assert all("same" in one.remedy for one in found)
