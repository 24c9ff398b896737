"""Samples of the device of a rank."""

import math

import pytest
import torch
from torch import nn

from sa1b.engine.watch import hardware
from sa1b.engine.watch.hardware import Sampler

GPU = torch.device("cuda", 1)


def test_a_gpu_is_sampled_in_si_units_and_what_it_does_not_support_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unsupported(device: torch.device) -> int:
        raise RuntimeError("Not Supported")

    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 97 if device == GPU else 0)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 61_200_000_000)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 640_500)
    monkeypatch.setitem(hardware._GPU, "gpu_clock_mhz", unsupported)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 5)
    latest = Sampler(GPU, nn.Identity()).latest()
    assert (math.isnan(latest.pop("forward")), latest.pop("peak_memory")) == (True, 5)
    assert math.isnan(latest.pop("gpu_clock_mhz"))
    assert latest == {"gpu_utilisation": 0.97, "gpu_memory_gb": 61.2, "gpu_power_w": 640.5}


def test_a_process_without_a_gpu_has_its_processors_and_its_memory() -> None:
    latest = Sampler(torch.device("cpu"), nn.Identity()).latest()
    assert latest.keys() == {"forward", "peak_memory", "cpu_utilisation", "memory_gb"}
    assert latest["memory_gb"] > 0.01
