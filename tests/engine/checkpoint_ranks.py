"""The checkpoint functions that the ranks of a launch run; the tests check their results."""

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sa1b.engine.checkpoint import tensors
from sa1b.engine.checkpoint.bucket import RemoteRun
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import CheckpointConfig, ParallelConfig
from sa1b.errors import CheckpointError
from sa1b.storage.bucket import BucketStore
from tests.engine.launch import group
from tests.engine.training import Run, begin, samples, whole

SAVED_AT = 2  # steps


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, numbers: Tensor) -> Tensor:
        output: Tensor = numbers + self.mlp(self.attn(numbers).relu())
        return output


class StandIn(nn.Module):
    """A complete model (`sa1b.engine.model`); no number of ranks divides the lengths of its parameters."""

    figures = ("loss",)
    shown: ClassVar[dict[str, str]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.image_encoder = nn.Module()
        self.model.image_encoder.blocks = nn.Sequential(Block(), Block())
        self.model.mask_decoder = nn.Linear(3, 1)  # one bias: most ranks have none
        self.model.register_buffer("matrix", torch.randn(3, 3))

    def forward(self, numbers: Tensor) -> Tensor:
        embedding = self.model.get_submodule("image_encoder.blocks")(numbers @ self.model.matrix)
        output: Tensor = self.model.get_submodule("mask_decoder")(embedding)
        return output

    def weights(self) -> nn.Module:
        return self.model

    def fsdp_units(self) -> list[list[nn.Module]]:
        blocks = self.model.get_submodule("image_encoder.blocks")
        return [[block.get_submodule("attn"), block.get_submodule("mlp")] for block in blocks.children()]

    def _not_called(self, *_: Any) -> Any:
        raise NotImplementedError

    inputs = read_weights = load_weights = layer_of = decays = flops = _not_called


@dataclass
class Tiny:
    module: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, number: int) -> None:
        numbers = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
        self.module(numbers).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def begin_tiny(rank_info: RankInfo, config: ParallelConfig) -> Tiny:
    module = wrap(StandIn(), config, rank_info)
    return Tiny(module, torch.optim.AdamW(module.parameters(), lr=0.1))


def everything(run: Tiny | Run) -> dict[str, Tensor]:
    """All tensors, in the order of their names."""
    found = {name: whole(tensor) for name, tensor in tensors.gather(run.module, run.optimizer).items()}
    return dict(sorted(found.items()))


def save(folder: Path, configs: dict[str, ParallelConfig]) -> dict[str, dict[str, Tensor]]:
    """Train, save, and continue training during the write; returns the saved values by name of the run."""
    saved = {}
    for name, config in configs.items():
        with group(config) as rank_info:
            run = begin_tiny(rank_info, config)
            for number in range(SAVED_AT):
                run.step(number)
            with torch.no_grad():
                run.module(torch.ones(1, 3))  # leaves the parameters of FSDP's root gathered
            checkpoints = Checkpoints(folder / name, CheckpointConfig())
            saved[name] = everything(run)
            checkpoints.save(SAVED_AT, run.module, run.optimizer, {"position": 10, "rate": 0.1})
            for number in range(SAVED_AT, SAVED_AT + 4):
                run.step(number)
            checkpoints.close()
    return saved


def load(
    folder: Path, names: list[str], configs: dict[str, ParallelConfig]
) -> dict[tuple[str, str], tuple[Any, dict[str, Tensor]]]:
    """State and tensors of a new run, in each mode, after it has loaded each run's checkpoint."""
    loaded = {}
    for mode, config in configs.items():
        with group(config) as rank_info:
            for name in names:
                run = begin_tiny(rank_info, config)
                checkpoints = Checkpoints(folder / name, CheckpointConfig())
                state = checkpoints.resume(run.module, run.optimizer)
                loaded[name, mode] = (state, everything(run))
                checkpoints.close()
                run.step(SAVED_AT)  # the optimizer can continue from the loaded state
    return loaded


def fail_on_the_last_rank(folder: Path, config: ParallelConfig) -> list[str]:
    """The disk of one rank is nearly full; returns the errors of three saves and of `close`."""
    raised = []
    with group(config) as rank_info:
        run = begin_tiny(rank_info, config)
        run.step(0)
        checkpoints = Checkpoints(folder, CheckpointConfig())
        checkpoints.save(1, run.module, run.optimizer, {})
        checkpoints.close()
        if rank_info.rank == rank_info.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        checkpoints = Checkpoints(folder, CheckpointConfig(tolerate=1))
        for step in (2, 3, 4):
            raised.append(_error(lambda step=step: checkpoints.save(step, run.module, run.optimizer, {})))
            dist.barrier()  # all ranks continue training
        raised.append(_error(checkpoints.close))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return raised


def save_twice(folder: Path, config: ParallelConfig) -> list[dict[str, Tensor]]:
    """The same for the real model."""
    saved = []
    with group(config) as rank_info:
        run = begin(rank_info, config, primed=False)
        checkpoints = Checkpoints(folder, CheckpointConfig())
        for step in (1, 2):
            run.step(step - 1)
            run.module.eval()(*samples(range(1)), evaluate=True)
            run.module.train()
            saved.append(everything(run))
            checkpoints.save(step, run.module, run.optimizer, {"step": step})
        checkpoints.close()
    return saved


def resume(folder: Path, config: ParallelConfig) -> tuple[Any, dict[str, Tensor]]:
    """The same for the real model."""
    with group(config) as rank_info:
        run = begin(rank_info, config, primed=False)
        checkpoints = Checkpoints(folder, CheckpointConfig())
        state = checkpoints.resume(run.module, run.optimizer)
        checkpoints.close()
        return state, everything(run)


def _error(work: Any) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return ""


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save_at_url(folder: Path, config: ParallelConfig) -> dict[str, Tensor]:
    """Train and save to a bucket; each rank has a folder of its own, as on another machine."""
    with group(config) as rank_info:
        run = begin_tiny(rank_info, config)
        run.step(0)
        remote = RemoteRun(_bucket(folder), folder / f"machine {rank_info.rank}")
        (remote.folder / "damaged.jsonl").write_text(f"of rank {rank_info.rank}\n")
        checkpoints = Checkpoints(remote, CheckpointConfig())
        saved = everything(run)
        checkpoints.save(1, run.module, run.optimizer, {"position": 10})
        run.step(1)
        checkpoints.close()
        assert not remote.folder.exists()
    return saved


def resume_at_url(folder: Path, config: ParallelConfig) -> tuple[Any, list[str]]:
    """State and tensors of a new run whose ranks share a folder, and the files there at its start."""
    with group(config) as rank_info:
        run = begin_tiny(rank_info, config)
        remote = RemoteRun(_bucket(folder), folder / "one machine")
        files = sorted(path.name for path in remote.folder.glob("*.jsonl"))
        checkpoints = Checkpoints(remote, CheckpointConfig())
        state = checkpoints.resume(run.module, run.optimizer)
        found = (state, everything(run)), files
        checkpoints.close()
    return found


def _bucket(folder: Path) -> BucketStore:
    return BucketStore(
        f"local://{folder}/bucket/run", scratch=folder / "scratch", options={"auto_mkdir": True}
    )
