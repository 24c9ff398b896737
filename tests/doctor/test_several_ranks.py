"""`sa1b doctor` on several ranks: ranks that are missing, alone or different, and gradients that are wrong."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.doctor.test_one_process import HOST, PATIENCE, command, root
from tests.processes import REPOSITORY, Process, rank_environments
from tests.shards import tiny_source

__all__ = ["root"]
FEW_FILES = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
runpy.run_module("sa1b", run_name="__main__", alter_sys=True)
"""


@contextmanager
def free_port() -> Iterator[dict[str, str]]:
    """MASTER_ADDR and a MASTER_PORT at which nothing listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(closed.getsockname()[1])}


def run(ranks: list[tuple[list[str], dict[str, str]]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each rank, from its command and its environment."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [Process(words, env=env, cwd=REPOSITORY, **pipes) for words, env in ranks]
    outputs = [rank.communicate(timeout=PATIENCE) for rank in started]
    return [(rank.returncode or 0, *texts) for rank, texts in zip(started, outputs, strict=True)]


def chosen(*checks: str) -> list[str]:
    return [word for check in checks for word in ("--only", check.replace(" ", "-"))]


def test_ranks_that_differ_are_named_and_equal_ones_merged() -> None:
    """Rank 1 has few open files and another NCCL variable, rank 2 never starts."""
    words = command(
        "--timeout", 10, "--seconds", 0.1, *chosen("open files", "environment", "space", "rendezvous")
    )
    with rank_environments(3) as (first, second, _):
        few = [sys.executable, "-c", FEW_FILES, *words[3:]]
        (code, text, errors), other = run([(words, first), (few, {**second, "NCCL_DEBUG": "TRACE"})])
    assert (code, other[:2]) == (1, (0, "")), errors
    rows = text.splitlines()
    assert rows[0] == "3 ranks on 1 host"
    (row,) = [row for row in rows if row.startswith("  FAILED   open files")]
    assert row.endswith(f"limit 300, 524 needed  [rank 1 on {HOST}]")
    assert f"  open files (rank 1 on {HOST}): Run `ulimit -n" in text
    assert [row for row in rows if "NCCL_DEBUG=TRACE: " in row and row.endswith(f"[rank 1 on {HOST}]")]
    assert "Set NCCL_DEBUG in the job script" in text
    (row,) = [row for row in rows if row.startswith("  FAILED   rendezvous")]
    assert "1 of 3 ranks did not answer at 127.0.0.1:" in row
    assert row.endswith("within 10 s  [rank 2]")
    assert len([row for row in rows if "temporary files in " in row]) == 1


def test_a_rank_that_cannot_reach_the_others_reports_its_own_findings() -> None:
    words = command(*chosen("rendezvous", "open files"), "--timeout", 1, "--seconds", 0.1)
    with free_port() as at:
        of_rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
        ((code, text, errors),) = run([(words, {**os.environ, **of_rank, **at})])
    assert code == 1
    assert text.startswith(f"rank 1 on {HOST}, alone\n")
    assert "  ok       open files  " in text
    (row,) = [row for row in text.splitlines() if row.startswith("  FAILED   rendezvous")]
    assert "connection refused" in row.lower()
    assert "frame #" not in errors  # of torch
    assert f"nc -zv 127.0.0.1 {at['MASTER_PORT']}" in text


def test_ranks_without_torchrun_name_one_that_was_not_started() -> None:
    """Rank 0 has the store, which does not wait for the missing rank."""
    words = command(*chosen("rendezvous", "bandwidth"), "--timeout", 10, "--seconds", 0.1)
    with free_port() as at:
        pass
    environment = {**os.environ, **at, "WORLD_SIZE": "3"}
    ranks = [(words, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    (code, text, errors), other = run(ranks)
    (row,) = [row for row in text.splitlines() if row.startswith("  FAILED   rendezvous")]
    assert row.endswith("within 10 s  [rank 2]")
    assert "  skipped  bandwidth   rank 2 did not answer\n" in text
    assert (code, other[:2]) == (1, (0, "")), errors


@pytest.mark.parametrize(
    ("rank", "reason", "remedy"),
    [
        (0, "another program listens at port", "et MASTER_PORT to a free port"),
        (1, "accepts connections and does not answer", "ss -ltnp"),
    ],
)
def test_a_foreign_program_at_the_port(rank: int, reason: str, remedy: str) -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": "2"}
        words = command(*chosen("rendezvous"), "--timeout", 1, "--seconds", 0.1)
        ((code, text, _),) = run([(words, {**os.environ, **at, "RANK": str(rank)})])
    assert code == 1
    (row,) = [row for row in text.splitlines() if row.startswith("  FAILED   rendezvous")]
    assert (reason in row, at["MASTER_PORT"] in row, remedy in text) == (True, True, True)


def test_a_missing_address_is_named() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MASTER_")}
    words = command(*chosen("rendezvous"), "--timeout", 1, "--seconds", 0.1)
    ((code, text, _),) = run([(words, {**environment, "RANK": "0", "WORLD_SIZE": "2"})])
    assert (code, "MASTER_ADDR" in text, "torchrun" in text) == (1, True, True)


def test_datasets_that_differ(root: Path, tmp_path: Path) -> None:
    sources = [tiny_source.write_source(tmp_path / "sa_000001.tar", tiny_source.pairs(range(5)))]
    another = tiny_source.make_root(tmp_path / "root", sources, tiny_source.ROOTS["plain"])
    with rank_environments(3) as ranks:
        roots = (root, another, tmp_path / "missing")
        words = [command(one, *chosen("dataset", "rendezvous")) for one in roots]
        (code, text, errors), *_ = run(list(zip(words, ranks, strict=True)))
    assert code == 1, errors
    rows = [row for row in text.splitlines() if row.startswith("  FAILED   dataset")]
    assert any("missing: no dataset there" in row and f"[rank 2 on {HOST}]" in row for row in rows)
    assert any("digest " in row and "on rank" in row for row in rows)
    assert f"If other machines have this dataset: mount their file system on {HOST}, copy it" in text


def test_torchrun(root: Path, tmp_path: Path) -> None:
    words = [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")]
    done = processes.run(
        [*words, *command(root, "--out", tmp_path, "--seconds", 0.1, "--timeout", 60, "--json")[1:]],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert (done.returncode != 0) == (document["exit_code"] != 0)
    states: dict[str, set[str]] = {}
    for one in document["findings"]:
        states.setdefault(one["check"], set()).add(one["state"])
    good = ("versions", "environment", "placement", "dataset", "rendezvous", "gradients", "bandwidth")
    assert {name: states[name] for name in good} == {name: {"ok"} for name in good}
    assert document["hosts"] == [HOST, HOST]
    assert {tuple(one["ranks"]) for one in document["findings"] if one["check"] == "dataset"} == {(0,), (1,)}
    assert any("GB/s" in one["figure"] for one in document["findings"] if one["check"] == "bandwidth")


# Faults of DDP, which each rank makes before the command.
FAULTY = """
import sys
import torch.distributed as dist
from sa1b.cli import main
from torch.nn.parallel import DistributedDataParallel as DDP

def hook(state, bucket):
    kept = bucket.buffer().clone()
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    total, world_size, odd = (lambda done: done.value()[0]), dist.get_world_size(), dist.get_rank() == 1
    return future.then(lambda done: {result})

create = DDP.__init__
def init(self, *given, **named):
    create(self, *given, **named)
    {change}
DDP.__init__ = init
main(sys.argv[1:])
"""
HOOK = "self.register_comm_hook(None, hook)"


@pytest.mark.parametrize(
    ("result", "change", "ranks", "figure", "remedy"),
    [
        ("kept if odd else total(done) / world_size", HOOK, {1}, "not synchronised", "hook"),
        ("total(done)", HOOK, {0, 1}, "the mean over the ranks times 2, the sum", "divides by another"),
        ("0", "self.require_backward_grad_sync = False", {0, 1}, "not synchronised", "no_sync"),
        ("total(done) * (1 + 1e-6 * odd) / world_size", HOOK, {1}, "has other bytes than on", "hook"),
    ],
)
def test_wrong_gradients_name_ranks_and_reason(
    result: str, change: str, ranks: set[int], figure: str, remedy: str
) -> None:
    code = FAULTY.format(result=result, change=change)
    checks = chosen("gradients", "rendezvous")
    words = [sys.executable, "-c", code, "doctor", *checks, "--timeout", "60", "--json"]
    with rank_environments(2) as environments:
        (code_, text, errors), _ = run([(words, environment) for environment in environments])
    failed = [one for one in json.loads(text)["findings"] if one["state"] == "failed"]
    assert code_ == 1, errors
    assert {rank for one in failed for rank in one["ranks"]} == ranks
    assert all(one["check"] == "gradients" and one["figure"].startswith("ddp: ") for one in failed)
    assert all(figure in one["figure"] and remedy in one["remedy"] for one in failed)


OWN_MODEL = """
import random, sys
import sa1b, torch
from sa1b.programs.doctor import check
from torch import nn

class Autoencoder(nn.Module):
    figures, shown = ("loss",), {{}}
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)
    def forward(self, images):
        errors = (self.layer(images.float() / 255) - images.float() / 255).square()
        loss, count = errors.mean(dim=(1, 2, 3)).sum(), errors.new_tensor(len(images))
        {change}
        return {{"loss": loss, "count": count}}
    def inputs(self, batch, seed): return (batch.images,)
    def weights(self): return self
    def read_weights(self, path): return torch.load(path)
    def load_weights(self, weights): return "all weights"
    def fsdp_units(self): return []
    def layer_of(self, name): return None
    def decays(self, name, parameter): return True
    def flops(self, images, masks): return 0.0

torch.manual_seed({seed})
stream = sa1b.Stream(sys.argv[1], global_batch=4, micro_batch=2, image_size=64)
report = check(Autoencoder(), next(iter(sa1b.Loader(stream, quiet=True))))
print(report.table())
sys.exit(report.exit_code())
"""


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ("", ["  ok       placement  ", "  ok       gradients  ddp: 2 gradients are those of one process"]),
        ("count = count.to('meta')", ["  FAILED   placement  count is on meta, not on cpu"]),
        (
            "loss = loss * random.random()",
            ["  FAILED   gradients  ddp: layer.weight and 1 more of 2: differs from"],
        ),
    ],
)
def test_a_model_of_the_user(root: Path, change: str, rows: list[str]) -> None:
    program = OWN_MODEL.format(change=change, seed=0)
    with rank_environments(2) as ranks:
        found = run([([sys.executable, "-c", program, str(root)], environment) for environment in ranks])
    for code, text, errors in found:  # each rank has the findings of all
        assert code == any("FAILED" in row for row in rows), errors
        assert text.startswith("2 ranks\n")
        assert all(row in text for row in rows), text


def test_a_model_that_differs_between_ranks(root: Path) -> None:
    program = OWN_MODEL.format(change="", seed="int(__import__('os').environ['RANK'])")
    with rank_environments(2) as ranks:
        found = run([([sys.executable, "-c", program, str(root)], environment) for environment in ranks])
    for code, _, errors in found:
        assert code == 1
        assert "build the model from the same seed" in errors


def test_a_preset_and_its_gradients(root: Path) -> None:
    words = command(*chosen("placement", "gradients"), "--preset", "grounding_tiny", "--timeout", 60)
    with rank_environments(2) as ranks:
        (code, text, errors), _ = run([(words, environment) for environment in ranks])
    assert code == 0, errors + text
    assert "  ok       gradients  fsdp: " in text
    done = processes.run(command("--preset", "vit"), capture_output=True, text=True)
    assert (done.returncode, "--preset vit: must be one of vit_b, " in done.stderr) == (2, True)


def test_a_rank_that_ends_before_the_others(root: Path) -> None:
    """It has met the others, and is killed while it reads."""
    words = command(root, *chosen("read rate", "rendezvous"), "--timeout", 5, "--seconds")
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (
        rank_environments(2) as (first, second),
        Process([*words, "100"], env=second, **pipes) as other,
        Process([*words, "1"], env=first, **pipes) as rank,
    ):
        assert "read rate" in rank.stderr.readline()
        other.kill()
        text, _ = rank.communicate(timeout=PATIENCE)
    assert rank.returncode == 1
    assert "  ok       read rate" in text or "  FAILED   read rate" in text
    assert [row for row in text.splitlines() if row.startswith("  FAILED   rendezvous  ")]
