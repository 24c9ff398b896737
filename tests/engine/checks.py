"""The functions that the ranks of a launch run; the tests check their results."""

import faulthandler
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sa1b.engine.model import unwrap
from sa1b.engine.precision import autocast
from sa1b.engine.ranks.agreement import DisagreementError, agree_on_weights
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.process_group import set_timeout
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import ParallelConfig
from sa1b.engine.step.optim import averaged, update_ema
from sa1b.sam.interactive import Interactive
from sa1b.sam.recipe import Recipe
from tests.engine import training
from tests.engine.launch import group
from tests.engine.training import begin, build, samples, whole

STEPS = 2


def trace(config: ParallelConfig, accumulation: int) -> dict[str, Any]:
    """A short run with an evaluation between its steps: losses, norms, first gradient and last weights."""
    with group(config) as rank_info:
        run = begin(rank_info, config, accumulation)
        for number in range(STEPS):
            run.step(number)
            if rank_info.world_size > 1 and number == 0:
                with autocast(config.precision, rank_info.device):
                    scores = run.module.eval()(*samples(range(1)), evaluate=True)
                assert scores["unions"].sum() > 0
                agree_on_weights(run.module, rank_info)
                run.module.train()
        return {
            "losses": run.losses,
            "norms": run.norms,
            "gradients": run.gradients,
            "weights": run.weights(),
        }


def evaluated_with_means(config: ParallelConfig) -> dict[str, Tensor]:
    """Predicted IoUs with the weights of a run, with their running mean, and with the weights again."""
    optim = replace(training.OPTIM, ema=0.9)
    with group(config) as rank_info:
        run = begin(rank_info, config, optim=optim)
        for number in range(STEPS):
            run.step(number)
            update_ema(run.optimizer, optim, number)
        before = run.weights()

        @torch.no_grad()
        def predicted() -> Tensor:
            return run.module.eval()(*samples(range(4)), evaluate=True)["predicted_iou"]

        own = predicted()
        with averaged(run.module, run.optimizer):
            means = run.weights()
            found = predicted()
        again = predicted()
        run.module.train()
        after = run.weights()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        return {"own": own, "found": found, "again": again, "means": means}


def many_short_runs(config: ParallelConfig) -> int:
    """Ends the process if a check hangs."""
    runs = 40
    for _ in range(runs):
        faulthandler.dump_traceback_later(60, exit=True)
        trace(config, 1)
    faulthandler.cancel_dump_traceback_later()
    return runs


def traces(cases: dict[str, tuple[ParallelConfig, int]]) -> dict[str, dict[str, Any]]:
    return {name: trace(config, accumulation) for name, (config, accumulation) in cases.items()}


def straight_and_resumed(config: ParallelConfig) -> tuple[Any, Any]:
    """Weights after four steps, and after two steps, a new process group and two more steps."""
    with group(config) as rank_info:
        run = begin(rank_info, config)
        for number in range(2):
            run.step(number)
        state = run.state()
        for number in (2, 3):
            run.step(number)
        straight = run.weights()
    with group(config) as rank_info:
        run = begin(rank_info, config, state=state)
        for number in (2, 3):
            run.step(number)
        return straight, run.weights()


def overflow(config: ParallelConfig) -> dict[str, Any]:
    """Three steps in fp16; in the second, a gradient is infinite on one rank (DDP) or in one shard (FSDP)."""
    name = "model.image_encoder.blocks.0.attn.qkv.weight"
    with group(config) as rank_info:
        run = begin(rank_info, config, accumulation=2)
        run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": 128.0})
        run.step(0)
        before, scale = run.weights(), run.scaler.get_scale()
        last = rank_info.world_size - 1
        if config.mode == "fsdp":
            run.step(1, lambda module: overflow_shard(module.get_parameter(name), rank_info))
        else:
            parameter = unwrap(run.module).get_parameter(name)
            handle = parameter.register_hook(
                lambda grad: grad * torch.inf if rank_info.rank == last else grad
            )
            run.step(1)
            handle.remove()
        after, lowered = run.weights(), run.scaler.get_scale()
        run.step(2)
        return {
            "before": before,
            "after": after,
            "end": run.weights(),
            "scales": [scale, lowered, run.scaler.get_scale()],
            "norms": run.norms,
        }


def overflow_shard(parameter: nn.Parameter, rank_info: RankInfo) -> None:
    """The last shard, which every replica has, because gradients are already summed."""
    shards = rank_info.mesh["shard"].size() if rank_info.mesh else 1
    if rank_info.rank % shards == shards - 1:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        gradient.to_local()[-1, -1] = torch.inf


def seen_in_forward(config: ParallelConfig) -> dict[str, Any]:
    """Number formats inside the forward pass, and the points that are passed to the prompt encoder."""
    seen: dict[str, Any] = {"points alone": points_alone()}
    with group(config) as rank_info:
        run = begin(rank_info, config)
        model = unwrap(run.module).model
        block = model.image_encoder.blocks[0]
        parts = {"norm": block.norm1, "attention": block.attn.qkv, "mlp": block.mlp.lin1}
        parts |= {"neck": model.image_encoder.neck[0], "decoder": model.mask_decoder.iou_prediction_head}
        for name, part in parts.items():
            part.register_forward_hook(
                lambda module, *_, name=name: seen.update({name: next(module.parameters()).dtype})
            )
        block.attn.qkv.register_forward_hook(lambda *passed: seen.update(product=passed[2].dtype))
        prompts: list[Tensor] = []
        model.prompt_encoder.register_forward_pre_hook(lambda _, inputs: prompts.append(inputs[0]))
        run.accumulate(samples(range(2)), last=True)
        seen["points"] = prompts[0]
        seen["gradients"] = {parameter.grad.dtype for _, parameter in run.named()}
    return seen


def points_alone() -> Tensor:
    """The points that are passed to the prompt encoder of the unwrapped module, in float32."""
    seen: list[Tensor] = []
    interactive = build()
    interactive.model.prompt_encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    interactive(*samples(range(2)))
    return seen[0]


class Embedding(Interactive):
    """Train the encoder alone, without the choice between masks, which rounding errors could change."""

    def __init__(self) -> None:
        super().__init__(build().model, Recipe())
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("image_encoder" in name)

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        embedding = self.model.embed(images).float()
        return (embedding * torch.linspace(-1, 1, embedding.numel()).view_as(embedding)).sum()


def encoder_gradient(config: ParallelConfig) -> Tensor:
    """The weights without biases, as one vector."""
    with group(config) as rank_info:
        module = wrap(Embedding(), config, rank_info)
        with autocast(config.precision, rank_info.device):
            loss = module(samples(range(rank_info.rank, 4, rank_info.world_size))[0])
        loss.backward()
        gradients = [
            whole(parameter.grad).flatten() for parameter in module.parameters() if parameter.requires_grad
        ]
        return torch.cat(gradients) * rank_info.world_size


def frozen(config: ParallelConfig) -> dict[str, Any]:
    optim = replace(training.OPTIM, freeze=("image_encoder",))
    with group(config) as rank_info:
        run = begin(rank_info, config, accumulation=2, optim=optim)
        before = run.weights()
        for number in range(2):
            run.step(number)
        return {"before": before, "after": run.weights(), "norms": run.norms}


def disagreement(config: ParallelConfig, what: str) -> str:
    """The error message if the last rank differs in one value; empty if the ranks accept the difference."""
    with group(config) as rank_info:
        odd = rank_info.rank == rank_info.world_size - 1
        try:
            if what == "seed":
                wrap(build(seed=int(odd)), config, rank_info)
            elif what == "shape":
                interactive = build()
                if odd:
                    interactive.model.mask_decoder.iou_token = nn.Embedding(2, 32)
                wrap(interactive, config, rank_info)
            else:
                module = wrap(build(), config, rank_info)
                agree_on_weights(module, rank_info)
                if odd:
                    tensor = unwrap(module).state_dict()[what]
                    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    held.view(-1)[-1] += 1e-6
                agree_on_weights(module, rank_info)
        except DisagreementError as error:
            return str(error)
    return ""


def errors_of_a_wait_for_silent_ranks(config: ParallelConfig, seconds: float) -> list[str]:
    """The errors on rank 0 of a collective on each group of the mesh, if the other ranks do not call it."""
    with group(config) as rank_info:
        store = dist.distributed_c10d._get_default_store()
        groups = [None, *(rank_info.mesh.get_all_groups() if rank_info.mesh else [])]
        for each in groups:
            dist.all_reduce(torch.ones(1), group=each)
        set_timeout(rank_info, seconds)
        errors = []
        if rank_info.rank:
            store.wait(["raised"], timedelta(minutes=10))
        else:
            for each in groups:
                try:
                    dist.all_reduce(torch.ones(1), group=each)
                except RuntimeError as error:
                    errors.append(str(error))
                else:
                    errors.append("")
            store.set("raised", "")
        return errors
