"""Devices: GPUs that are hidden, broken, shared or slow, and tensors on the wrong device."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sa1b.programs.doctor import device
from sa1b.programs.doctor.check import Check, RankProcess
from sa1b.programs.doctor.device import Gpus, copy_finding, placed, small_step
from sa1b.programs.doctor.report import Finding, agreement

CPU, META = torch.device("cpu"), torch.device("meta")


def only(findings: Iterator[Finding]) -> Finding:
    (one,) = findings
    assert bool(one.remedy) == (one.state != "ok")
    return one


@pytest.mark.parametrize(
    ("gpus", "listed", "figure", "remedy"),
    [
        (Gpus(None, "550.54", 8, 0), None, "torch is a CPU build, and this machine has 8 GPUs", "Install a CUDA"),
        (Gpus("12.8", "470.57.02", 1, 0), None, "driver 470.57.02 is too old for CUDA 12.8, which needs 525", "Update"),
        (Gpus("13.0", "550.54", 1, 0), None, "driver 550.54 is too old for CUDA 13.0, which needs 580", "Update"),
        (Gpus("12.8", "550.54", 2, 0), "", "CUDA_VISIBLE_DEVICES='' hides all of 2 GPUs", "Unset"),
        (Gpus("12.8", "550.54", 2, 0), "-1", "CUDA_VISIBLE_DEVICES='-1' hides all", "Unset"),
        (Gpus("12.8", "550.54", 2, 0), "7", "CUDA_VISIBLE_DEVICES='7' hides all", "nvidia-smi -L"),
        (Gpus("12.8", "550.54", 2, 1), "0,0", "CUDA_VISIBLE_DEVICES=0,0 lists a GPU twice", "List each GPU once"),
        (Gpus("12.8", "550.54", 2, 2), "0,1,7", "lists 3 GPUs, and torch sees 2", "Remove"),
        (Gpus("12.8", "550.54", 1, 0, "unknown error"), None, "torch sees none of 1 GPU: unknown error", "nvidia-smi"),
    ],
)  # fmt: skip
def test_gpus_that_are_not_visible(gpus: Gpus, listed: str | None, figure: str, remedy: str) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    found = only(device.visible_device(RankProcess(environment=environment), gpus))
    assert found.state == "failed"
    assert figure in found.figure
    assert remedy in found.remedy


def test_a_container_without_gpus_and_a_machine_without_any() -> None:
    found = only(device.visible_device(RankProcess(environment={}), Gpus("12.8", None, 0, 0)))
    assert found.state == "warning"
    assert "--gpus all" in found.remedy
    assert only(device.visible_device(RankProcess(environment={}), Gpus(None, None, 0, 0))).state == "ok"


def test_more_ranks_than_gpus() -> None:
    process = RankProcess(environment={}, rank=3, local_rank=3, world_size=4, local_world_size=4)
    found = only(device.visible_device(process, Gpus("12.8", "550.54", 2, 2)))
    assert found.figure == "local rank 3 has no GPU: this process sees 2"


def test_two_ranks_with_one_gpu_are_named() -> None:
    def of(rank: int, uuid: str) -> Finding:
        return Finding("device", "ok", "cuda:0", "", (rank,), f"host{rank // 2}", {"uuid": uuid})

    good = [of(0, "GPU-a"), of(1, "GPU-b"), of(2, "GPU-a"), of(3, "GPU-b")]
    assert not list(agreement(good))
    found = only(agreement([*good[:3], of(3, "GPU-a")]))
    assert (found.state, found.where()) == ("failed", "ranks 2-3 on host1")
    assert "GPU-a" in found.figure


def driver_tree(folder: Path) -> Path:
    (folder / "proc/driver/nvidia").mkdir(parents=True)
    (folder / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021\nGCC version\n"
    )
    (folder / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (folder / "dev" / name).touch()
    return folder


def test_driver_and_gpus_are_read_from_the_machine(tmp_path: Path) -> None:
    found = Gpus.of_this_process(RankProcess(system=driver_tree(tmp_path)))
    assert (found.driver, found.nodes) == ("470.57.02", 2)


GOOD = "0, GPU-aaa, NVIDIA H100, 0, Enabled, Disabled, Default, Not Active, 5"


def asked(folder: Path, answer: str, code: int = 0, **more: str) -> list[Finding]:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\nexit {code}\n")
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **more}
    return list(device.gpu_state(RankProcess(environment=environment)))


@pytest.mark.parametrize(
    ("old", "new", "state", "figure", "remedy"),
    [
        ("H100, 0", "H100, 3", "failed", "3 uncorrected memory errors", "drain the node"),
        ("Default", "Prohibited", "failed", "compute mode Prohibited", "nvidia-smi -i 0 -c DEFAULT"),
        ("Not Active", "Active", "warning", "slowed down by hardware", "temperature"),
        ("Disabled, Default", "Enabled, Default", "warning", "MIG splits it", "-mig 0"),
        ("Enabled, Disabled", "Disabled, Disabled", "warning", "persistence mode is off", "nvidia-smi -pm 1"),
        ("Active, 5", "Active, 9000", "warning", "9000 MiB are in use", "End the other processes"),
    ],
)
def test_the_state_of_a_gpu(tmp_path: Path, old: str, new: str, state: str, figure: str, remedy: str) -> None:
    (found,) = asked(tmp_path, GOOD.replace(old, new))
    assert found.state == state
    assert found.figure.startswith("GPU 0 (NVIDIA H100, GPU-aaa): ")
    assert figure in found.figure
    assert remedy in found.remedy


def test_a_good_gpu_and_those_of_other_jobs(tmp_path: Path) -> None:
    (found,) = asked(tmp_path, GOOD)
    assert (found.state, found.figure) == ("ok", "1 GPU, no errors, no other users")
    broken = GOOD.replace("0, GPU-aaa, NVIDIA H100, 0", "1, GPU-bbb, NVIDIA H100, 7")
    assert [one.state for one in asked(tmp_path, f"{GOOD}\n{broken}")] == ["failed"]
    assert [one.state for one in asked(tmp_path, f"{GOOD}\n{broken}", CUDA_VISIBLE_DEVICES="0")] == ["ok"]
    assert [one.state for one in asked(tmp_path, f"{GOOD}\n{broken}", CUDA_VISIBLE_DEVICES="GPU-b")] == [
        "failed"
    ]


def test_an_older_driver_has_another_name_for_a_field(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in *clocks_event_reasons*)\n'
        "  echo 'Field \"clocks_event_reasons.hw_slowdown\" is not a valid field to query.'; exit 2;; esac\n"
        f"cat <<'END'\n{GOOD}\nEND\n"
    )
    program.chmod(0o755)
    (found,) = device.gpu_state(RankProcess(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"}))
    assert found.state == "ok", found.figure


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    (found,) = asked(tmp_path, "Unable to determine the device handle for GPU0000:3D:00.0", 15)
    assert found.state == "failed"
    assert "Unable to determine the device handle" in found.figure
    assert "drain" in found.remedy


def test_without_a_gpu_the_checks_of_gpus_are_skipped() -> None:
    process = RankProcess(environment={"PATH": "/nowhere"})
    for work in (device.gpu_state, device.pinned_copy):
        assert only(work(process)).state == "skipped"


@pytest.mark.parametrize(("rate", "state"), [(24e9, "ok"), (3e9, "warning"), (0.4e9, "failed")])
def test_the_rate_of_copies_to_the_gpu(rate: float, state: str) -> None:
    found = copy_finding(rate)
    assert found.state == state
    assert found.figure.startswith(f"{rate / 1e9:.1f} GB/s from pinned memory")


def test_a_parameter_a_gradient_or_a_target_on_another_device_is_named() -> None:
    module, others = small_step(CPU)
    good = placed(CPU, {"model": module, **others})
    assert good.state == "ok"
    assert good.values["tensors"] > 300  # parameters, gradients, buffers, inputs, results
    module.register_buffer("table", torch.zeros(2, device=META))
    found = placed(CPU, {"model": module, **others})
    assert (found.state, found.figure) == ("failed", "model.table is on meta, not on cpu")
    images, targets, keys = others["inputs"]
    inputs = (images, {"boxes": targets.boxes.to(META)}, keys)
    assert placed(CPU, {"inputs": inputs}).figure == "inputs.1.boxes is on meta, not on cpu"


def test_an_error_of_a_check_is_a_finding_and_stops_no_other_check() -> None:
    def broken(process: RankProcess) -> Iterator[Finding]:
        raise ValueError("unforeseen")
        yield

    (found,) = Check("broken", broken).run(RankProcess())
    assert found.state == "failed"
    assert "ValueError: unforeseen" in found.figure
    (after,) = Check("later", broken, needs=("broken",)).run(RankProcess(), [found])
    assert (after.state, after.figure) == ("skipped", "the check 'broken' failed")
