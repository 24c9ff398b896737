"""Versions and packages: missing, too old, without their compiled part, or different between ranks."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import google_crc32c
import pytest

from sa1b.programs.doctor import machine
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding, agreement

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
