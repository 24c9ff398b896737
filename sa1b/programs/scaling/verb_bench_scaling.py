"""Measure how training scales on this machine: 1 to N ranks, what communication and data cost, and why.

Example: sa1b bench scaling --ranks 1,2 --preset tiny
         sa1b bench scaling shards --preset vit_b --micro-batch 4 --report scaling.html

Starts the ranks itself, on the GPUs or on separate CPUs of this machine, and takes real training steps.

Exit code 0: measured; 1: a case failed, the others are measured; 2: nothing was measured; 130: interrupted.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import tyro
from tyro.conf import Positional

from sa1b.arguments import Range, numbers_of
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.sources.path_arguments import check_report, takes_endpoint
from sa1b.storage.atomic import write_whole

TOUR = (120, "See and select", "how training scales", "sa1b bench scaling --ranks 1,2")

T = TypeVar("T", bound=str)


@takes_endpoint
def main(
    root: Annotated[Positional[str | None], tyro.conf.arg(metavar="ROOT")] = None,
    /,
    preset: str | None = None,
    ranks: Annotated[str | None, tyro.conf.arg(metavar="N,N,...")] = None,
    modes: Annotated[str | None, tyro.conf.arg(metavar="MODE,...")] = None,
    precisions: Annotated[str, tyro.conf.arg(metavar="FORMAT,...")] = "fp32,bf16",
    micro_batch: Annotated[int, Range(1)] = 2,
    global_batch: Annotated[int | None, Range(1)] = None,
    masks: Annotated[int | None, Range(1)] = None,
    threads: Annotated[int | None, Range(1)] = None,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    steps: Annotated[int, Range(1)] = 5,
    rounds: Annotated[int, Range(1)] = 3,
    timeout: Annotated[float, Range(10, 36000)] = 600.0,
    report: Annotated[Path | None, tyro.conf.arg(metavar="FILE.html")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Measure how training scales on this machine: 1 to N ranks, what communication and data cost, and why.

    Args:
        root: Dataset directory that `sa1b reshard` made, or its URL (s3://...). Without it, ranks compute
            synthetic batches in memory, and the time for data is not measured.
        preset: Preset of `sa1b train`; by default vit_b on GPUs and tiny on CPUs.
        ranks: Numbers of ranks; by default 1, 2, 4, ... up to the GPUs or CPUs of this machine.
        modes: ddp, zero1, fsdp-full, fsdp-grad_op, fsdp-hybrid (two copies of the model, at least 4 ranks);
            by default these without zero1. Variants: ddp-bucket-1, ddp-bucket-10, ddp-bucket-50 (MiB; ddp has
            25), ddp-bf16, ddp-powersgd-4, fsdp-wrap-none, fsdp-reduce-bf16, pipeline, pipeline-gpipe.
        precisions: fp32, tf32, bf16, fp16.
        micro_batch: Images that a rank computes at a time.
        global_batch: Images of a step over all ranks in strong scaling; by default one micro-batch for each
            rank of the largest run.
        masks: Largest number of masks per image; by default that of the preset.
        threads: Threads of each rank, for computation on CPUs and for the loader; by default the CPUs divided
            by the largest number of ranks.
        device: auto: GPUs if there are any.
        steps: Steps of each part of a case in a round.
        rounds: Rounds over all cases. Figures are medians of the rounds.
        timeout: Seconds after which a case without progress has failed, 10 to 36000.
        report: Write a page with charts.
        json_output: Print the result as JSON, without progress.
    """
    check_report(report)
    with loading():
        from sa1b.engine.settings import Precision
        from sa1b.programs.scaling.cases import MODES, Machine, modes_for, series
        from sa1b.programs.scaling.measurement import Settings, measure
        from sa1b.programs.scaling.page import judge, page
        from sa1b.recipes.presets import SAM_PRESETS
        from sa1b.shards.dataset import Dataset, check_images
    machine = Machine.of_this_process(device)
    counts = machine.ranks(
        None if ranks is None else [int(number) for number in numbers_of("--ranks", ranks, int, 1)], threads
    )
    cases = series(
        counts,
        modes_for(counts) if modes is None else _words("--modes", modes, tuple(MODES)),
        _words("--precisions", precisions, get_args(Precision)),
        micro_batch=micro_batch,
        global_batch=micro_batch * counts[-1] if global_batch is None else global_batch,
    )
    preset = preset or ("vit_b" if machine.device == "cuda" else "tiny")
    if preset not in SAM_PRESETS:
        raise UsageError(f"--preset {preset}: must be one of {', '.join(SAM_PRESETS)}")
    config = SAM_PRESETS[preset]
    if root is not None:
        check_images(Dataset(root), "a benchmark")  # before any process starts
    data = replace(config.data, root=root or "", masks=config.data.masks if masks is None else masks)
    settings = Settings(
        config=replace(config, data=data),
        device=machine.device,
        placement=machine.placement(counts[-1], threads),
        steps=steps,
        rounds=rounds,
        timeout=timeout,
    )
    result = measure(cases, settings, quiet=json_output)
    verdict = judge(result)
    if report is not None:
        write_whole(report, page(result, verdict).encode())
    if json_output:
        print(json.dumps({**result.document(), "verdict": verdict.lines, "advice": verdict.advice}, indent=1))
    else:
        print(f"{result.table()}\n\n{verdict}")
        if report is not None:
            print(f"\ncharts: {report}")
    return result.exit_code()


def _words(flag: str, text: str, known: tuple[T, ...]) -> tuple[T, ...]:
    given = [word.strip() for word in text.split(",")]
    for word in given:
        if word not in known:
            raise UsageError(f"{flag} {word}: must be one of {', '.join(known)}")
    return tuple(word for word in known if word in given)
