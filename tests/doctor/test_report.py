"""The table of several ranks: equal findings in one line, and what ranks should have in common."""

import os
import sys

from tests import processes
from tests.doctor.test_one_process import HOST, command
from tests.doctor.test_several_ranks import chosen, run
from tests.processes import rank_environments

# Of rank R: another Python, R + 300 open files, and the only GPU of the machine, which is pretended.
PROGRAM = """
import os, platform, resource, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from sa1b.cli import main

rank, start = int(os.environ["RANK"]), dist.init_process_group
resource.setrlimit(resource.RLIMIT_NOFILE, (rank + 300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
platform.python_version = lambda: "3.12.{}".format(rank // 2)
if "device" in sys.argv:
    torch.cuda.init = torch.cuda.set_device = lambda *given: None
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    gpu = SimpleNamespace(name="H100", total_memory=80 << 30, uuid="GPU-aaa")
    torch.cuda.get_device_properties = lambda device: gpu
    torch.Tensor.to = lambda self, *given, **named: self
    dist.init_process_group = lambda backend, **named: start("gloo", **named)
main(sys.argv[1:])
"""


def table(ranks: int, *checks: str) -> list[str]:
    words = [sys.executable, "-c", PROGRAM, "doctor", *chosen(*checks, "rendezvous"), "--timeout", "60"]
    with rank_environments(ranks) as environments:
        (code, text, errors), *_ = run([(words, environment) for environment in environments])
    assert code == 1 or "FAILED" not in text, errors
    return text.splitlines()


def test_numbers_become_a_range_and_versions_that_differ_name_ranks_and_hosts() -> None:
    lines = table(3, "versions", "open files")
    assert f"  FAILED   open files  limit 300 to 302, 524 needed  [ranks 0-2 on {HOST}]" in lines
    assert f"  warning  versions    python 3.12.1, and 3.12.0 on ranks 0-1  [rank 2 on {HOST}]" in lines
    assert [line[:22] for line in lines if "Python 3.12." in line] == ["  ok       versions    "[:22]] * 2
    assert f"  versions (rank 2 on {HOST}): Use the same python on all machines" in lines
    assert lines[-1] == "1 failed, 1 warning, 3 ok"


def test_ranks_with_one_gpu_are_named() -> None:
    lines = table(2, "device")
    assert f"  FAILED   device      2 ranks have the same GPU (GPU-aaa)  [ranks 0-1 on {HOST}]" in lines
    assert [line for line in lines if line.endswith("let each task see its own (srun --gpus-per-task=1)")]


def test_interfaces_may_differ_and_a_check_fills_a_few_lines() -> None:
    words = command(*chosen("environment", "rendezvous"))
    with rank_environments(2) as (first, second):
        (code, text, errors), _ = run(
            [(words, first | {"NCCL_SOCKET_IFNAME": "lo"}), (words, second | {"NCCL_SOCKET_IFNAME": "=lo"})]
        )
    assert (code, "SOCKET_IFNAME =lo, and" in text) == (0, False), errors
    ruinous = ("P2P_DISABLE", "SHM_DISABLE", "ALGO", "PROTO", "TIMEOUT")
    variables = {f"NCCL_{name}": "1" for name in ruinous} | {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    variables |= {
        "CUDA_LAUNCH_BLOCKING": "1",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "NUMBA_DISABLE_JIT": "1",
    }
    done = processes.run(
        command(*chosen("environment")), env={**os.environ, **variables}, capture_output=True, text=True
    )
    rows = [row for row in done.stdout.partition("Warnings:")[0].splitlines() if "=1: " in row]
    assert (done.returncode, len(rows)) == (0, 8)
    assert "and 2 more; --json lists all" in done.stdout
    assert done.stdout.endswith("9 warnings, 1 ok\n")
