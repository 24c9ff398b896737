"""Samples of a GPU by NVML, and of a process, taken by a thread that ends with the run."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sa1b.engine.watch.hardware import CPU, GPU, Sampler

UUID = "1234-abcd"
DEVICE = torch.device("cuda", 1)


class NvmlError(Exception):
    pass


class Nvml:
    """A GPU of the test, with the interface of pynvml. `missing`: functions that this GPU does not support."""

    NVMLError = NvmlError

    def __init__(self, *missing: str, uuid: str = f"GPU-{UUID}") -> None:
        self.missing, self.uuid, self.samples = missing, uuid, 0

    def nvmlInit(self) -> None:
        if "nvmlInit" in self.missing:
            raise NvmlError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise NvmlError("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        assert handle == "handle"
        self.samples += 1
        return SimpleNamespace(gpu=97, memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=61_000_000_000)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if "power" in self.missing:
            raise NvmlError("Not Supported")
        return 640_500


@pytest.fixture(autouse=True)
def properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=UUID))


@pytest.fixture
def threads() -> Callable[[], list[threading.Thread]]:
    """The threads of samplers that this test started."""
    before = threading.enumerate()  # of runs that a test before this one left in this process
    return lambda: [one for one in threading.enumerate() if one.name == "sa1b-sampler" and one not in before]


def sampled(sampler: Sampler, name: str) -> dict[str, float]:
    """The first sample that has a figure."""
    end = time.monotonic() + 60
    while math.isnan(sampler.latest()[name]):
        assert time.monotonic() < end
        time.sleep(0.001)
    return sampler.latest()


def test_a_gpu_is_found_by_its_uuid_and_sampled_in_si_units_until_the_end(
    threads: Callable[[], list[threading.Thread]],
) -> None:
    nvml = Nvml()
    sampler = Sampler(DEVICE, nvml=nvml, interval=0.001)
    assert sampled(sampler, "gpu_power_w") == dict(zip(GPU, (0.97, 61.0, 640.5), strict=True))
    while nvml.samples < 3:
        time.sleep(0.001)
    sampler.close()
    taken = nvml.samples
    assert not threads()
    assert nvml.samples == taken
    sampler.close()


def test_a_driver_that_does_not_answer_does_not_stop_the_end(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[], list[threading.Thread]]
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def power(handle: str) -> int:
        asked.set()
        answers.wait(60)
        return 0

    nvml = Nvml()
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", power)
    monkeypatch.setattr("sa1b.engine.watch.hardware._PATIENCE", 0.01)
    sampler = Sampler(DEVICE, nvml=nvml)
    assert asked.wait(60)
    sampler.close()
    (thread,) = threads()
    assert thread.daemon
    answers.set()
    thread.join(60)


def test_what_a_gpu_does_not_support_is_unknown() -> None:
    sampler = Sampler(DEVICE, nvml=Nvml("power"))
    found = sampled(sampler, "gpu_memory_gb")
    assert math.isnan(found.pop("gpu_power_w"))
    assert not any(map(math.isnan, found.values()))
    sampler.close()


@pytest.mark.parametrize("nvml", [Nvml("nvmlInit"), Nvml(uuid="GPU-other")])
def test_without_a_driver_or_the_gpu_all_is_unknown(nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    sampler = Sampler(DEVICE, nvml=nvml)
    assert list(sampler.latest()) == list(GPU)
    assert all(map(math.isnan, sampler.latest().values()))
    assert "utilisation of cuda:1 is not recorded" in caplog.text
    sampler.close()


def test_without_pynvml_all_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sa1b.engine.watch.hardware.find_spec", lambda name: None)
    sampler = Sampler(DEVICE)
    assert all(map(math.isnan, sampler.latest().values()))
    sampler.close()


def test_a_process_has_processor_time_and_resident_memory(tmp_path: Path) -> None:
    sampler = Sampler(torch.device("cpu"), interval=0.001)
    found = sampled(sampler, "memory_gb")
    sampler.close()
    assert list(found) == list(CPU)
    assert 0.01 < found["memory_gb"] < 1000
    assert found["cpu_utilisation"] >= 0
    without = Sampler(torch.device("cpu"), interval=0.001, proc=tmp_path)
    found = sampled(without, "cpu_utilisation")
    without.close()
    assert math.isnan(found["memory_gb"])
