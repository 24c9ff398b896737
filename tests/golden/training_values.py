"""Golden values of training: inputs that are written once, and what the package computes from them.

`make` writes the inputs: a dataset directory, a run of two ranks for each of two modes that was stopped after step 2
of 4, and their weights. `record` computes the values in sections, with which their keys begin. A section is a generator:
it yields the runs that it needs, gets how they ended, and returns its values. So the same processes do all runs, because
the first one of a process takes a second more than the others.

As a program, `python -m tests.golden.training_values FOLDER RUNS`, it is a rank of runs in this folder, one after the
other; RUNS are their flags as JSON.
"""

import gc
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import sa1b
from sa1b import train
from sa1b.recipes.presets import PRESETS
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.recipe import Recipe
from tests import kit
from tests.engine import reconstruction
from tests.processes import REPOSITORY, Process, rank_environments

Values = dict[str, Any]


def words(text: str) -> list[str]:
    return text.split()


COMMON = words(
    "--data.root root --data.threads 1 --data.global-batch 3 --data.micro-batch 2 --data.flip 0.5 --optim.warmup 1 "
    "--parallel.device cpu --logging.tensorboard False"
)
SIZES = words("--model.image-size 64 --model.window 2 --model.channels 32 --model.drop-path 0.3")
ENCODER = words(
    "--model.width 16 --model.heads 1 --model.depth 2 --model.global-blocks 1 --model.pixel-features 8"
)
SAM = [*words("--preset tiny --data.masks 4"), *COMMON, *SIZES, *ENCODER]
DISTILL = [*words("--preset distill_tiny --distill.teacher weights.safetensors"), *COMMON, *SIZES, *ENCODER]
GROUNDING = [*words("--preset grounding_tiny --data.masks 4 --data.text phrases.parquet"), *COMMON, *SIZES]
GROUNDING += words(
    "--data.micro-batch 3 --model.width 32 --model.heads 2 --text.width 32 --text.depth 1 --text.heads 2"
)
SMALL = ["--preset", "small", *COMMON]
MODELS = {"tiny": SAM, "distill_tiny": DISTILL, "grounding_tiny": GROUNDING, "small": SMALL}
MODES = {"none": 1, "ddp": 2, "fsdp": 2}  # and ranks
# The parts with most of the weights do not change, so that the committed checkpoints are small.
FROZEN = ["mask_decoder.transformer.layers", "image_encoder.neck", "similarity.pixels.context"]
FOUR = [*SAM, "--optim.steps", "4", "--checkpoint.every", "2", "--optim.freeze", *FROZEN]
OLD = {"ddp": [*FOUR, "--optim.ema", "0.9"], "fsdp": FOUR}
FIGURES = words("loss focal dice iou_loss iou_first iou_last error lr grad_norm masks images")


# Runs

Runs = dict[str, tuple[str, Sequence[str]]]  # name -> mode, and flags without --out
Ended = dict[str, tuple[int, str]]  # name -> exit code, and what rank 0 printed
Section = Generator[Runs, Ended, Values]


def rank(folder: str, runs: Sequence[Sequence[str]]) -> None:
    """Be a rank of these runs, one after the other."""
    torch.set_num_threads(1)
    os.chdir(folder)
    for flags in runs:
        gc.freeze()  # a run ends with gc.unfreeze(), and the next one collects garbage three times: 0.3 s each
        presets = reconstruction.PRESETS if "small" in flags else PRESETS
        print(f"exit code {train.main(presets, arguments=flags)}", flush=True)
    train.exit_at_once(0)


def out(name: str) -> str:
    """--out of a run."""
    return name.replace("/", "-").replace(" ", "-")


def trained(runs: Runs, work: Path) -> Ended:
    """How these runs end.

    Those of one rank and those of two ranks are computed at the same time, each by the same processes.
    """
    started, ended = [], Ended()
    with rank_environments(2) as environments:
        for ranks in (1, 2):
            named = {name: run for name, run in runs.items() if MODES[run[0]] == ranks}
            todo = [
                [*flags, "--parallel.mode", mode, "--out", out(name)] for name, (mode, flags) in named.items()
            ]
            command = [sys.executable, "-m", "tests.golden.training_values", work, json.dumps(todo)]
            for environment in (environments if ranks == 2 else [None]) if named else ():
                options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                started.append((list(named), Process(command, env=environment, cwd=REPOSITORY, **options)))
        for names, process in reversed(started):  # so that rank 0 is after rank 1
            output = process.communicate(timeout=600)[0]
            parts = re.split(r"^exit code (\d+)\n", output, flags=re.MULTILINE)
            ended |= dict.fromkeys(names, (-1, output))
            ended |= {
                name: (int(code), part)
                for name, part, code in zip(names, parts[::2], parts[1::2], strict=False)
            }
    return ended


def lines(run: Path) -> list[Values]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def figures(run: Path) -> Values:
    """Figure -> its values of all steps, which are numbered from 1."""
    steps = [line for line in lines(run) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    found: Values = {name: [line[name] for line in steps] for name in FIGURES if name in steps[0]}
    worst = [line["worst_image"] for line in steps if "worst_image" in line]
    return found | {"worst image": [[one["id"], one["position"]] for one in worst]}


def all_figures(section: str, runs: Runs, ended: Ended) -> Values:
    """Name -> figures of each run of a section."""
    failed = [ended[name][1] for name in runs if ended[name][0]]
    assert not failed, "\n".join(failed)
    return {name: figures(Path(out(f"{section}/{name}"))) for name in runs}


# Values


def digest(tensors: Mapping[str, Any]) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        sha.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return sha.hexdigest()[:16]


def outlines(masks: Iterable[Any]) -> list[list[float]]:
    """Of each mask its area and its centre: a pixel on the border may differ between processors."""
    found = []
    for mask in masks:
        rows, columns = np.nonzero(mask)
        found.append(
            [float(value) for value in (len(rows), rows.mean(), columns.mean())] if len(rows) else []
        )
    return found


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint, as torch reads it."""
    whole = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, whole)
    found: dict[str, torch.Tensor] = torch.load(whole, weights_only=True)
    return found


def has_gradient(name: str) -> bool:
    """Not a bias of keys: attention is the same for any, so that its gradient is what rounding leaves."""
    return "k_proj.bias" not in name


def norms(values: Mapping[str, torch.Tensor]) -> Values:
    """Of each tensor the norm, and the norm with weights that grow from 1 to 2, which depends on the order."""
    found = {}
    for name, tensor in values.items():
        if not has_gradient(name):
            continue
        flat = tensor.double().flatten()
        found[name] = [
            float((flat * by).norm()) for by in (1, torch.linspace(1, 2, len(flat), dtype=flat.dtype))
        ]
    return found


def rounded(value: Any) -> Any:
    """Floats with eight digits, which is what float32 has."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def shape(value: Any) -> Any:
    """A JSON value with types in place of values; a list has the shapes of its items, each once.

    "changes" are those of the package and its libraries since the run.
    """
    if isinstance(value, dict):
        return {name: "list" if name == "changes" else shape(inner) for name, inner in value.items()}
    if isinstance(value, list):
        shapes = [shape(inner) for inner in value]
        return [one for number, one in enumerate(shapes) if one not in shapes[:number]]
    return type(value).__name__


# Sections


def losses() -> Section:
    """Ten steps of each model in each mode."""
    ten = {model: [*flags, "--optim.steps", "10"] for model, flags in MODELS.items()}
    runs: Runs = {f"{model}/{mode}": (mode, flags) for model, flags in ten.items() for mode in MODES}
    return all_figures("losses", runs, (yield runs))


def old_runs() -> Section:
    """The committed runs, of an earlier version, are refused where they should go on; their weights are read."""
    runs: Runs = {}
    values: Values = {}
    for old, flags in OLD.items():
        checkpoint = Path(old, "checkpoints", "step-00000002")
        values[f"{old}/without a stop"] = json.loads(Path(f"{old}.json").read_text())
        values[f"{old}/manifest"] = manifest = json.loads((checkpoint / "manifest.json").read_text())
        sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in checkpoint.iterdir()}
        assert {name: one["sha256"] for name, one in manifest["files"].items()}.items() <= sums.items()
        values[f"{old}/state"] = shape(json.loads((checkpoint / "state.json").read_text()))
        whole = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
        values[f"{old}/names"] = names(whole)
        values[f"{old}/bytes"] = digest(tensors(checkpoint))
        for mode in MODES:
            shutil.copytree(old, out(f"old runs/{old}/resumed in {mode}"))
            runs[f"{old}/resumed in {mode}"] = (mode, flags)
    ended = yield runs
    for name in runs:
        code, text = ended[name]
        values[name] = [code, [word for word in ("--init", "--out") if word in text.splitlines()[-1]]]
    return values


def names(state: Mapping[str, Any]) -> Values:
    """Names and shapes of the weights of a checkpoint, and for which of them there is more."""
    weights = [name.removeprefix("model.") for name in state if name.startswith("model.")]
    more: dict[str, list[str]] = {}
    for name in sorted(state.keys() - {f"model.{one}" for one in weights}):
        [weight] = [one for one in weights if f".{one}." in f".{name}."]
        more.setdefault(name.replace(weight, "*"), []).append(weight)
    lists = list(more.values())
    shapes = {name: list(state[f"model.{name}"].size) for name in sorted(weights)}
    return {
        "weights": shapes,
        "more": {kind: lists.index(of) for kind, of in more.items()},
        "of": [sorted(one) for one in lists],
    }


def weights() -> Section:
    """Weights in a run, in a checkpoint and in files: as they are read, converted, predicted with, started from."""
    values: Values = {}
    image = sa1b.open("root")[3].image
    height, width = image.shape[:2]
    for name in ("ddp", "fsdp", "fsdp/checkpoints/step-00000002", "weights.safetensors", "weights.pth"):
        model = sa1b.load_model(name)
        values[f"{name}/tensors"] = digest(model.state_dict())
        points = [[[width // 2, height // 2]], [[10, 20]]]
        found = sa1b.predict(model, image, points=points)
        one = sa1b.predict(model, image, points=[[10, 20], [60, 40], [30, 30]], labels=[1, 0, 1])
        box = sa1b.predict(model, sa1b.embed_image(model, image), boxes=[[20, 10, 90, 70]])
        for kind, prediction in (("points", found), ("three points", one), ("box", box)):
            iou = prediction.predicted_iou.astype(float).tolist()
            logits = norms({"logits": torch.from_numpy(prediction.logits)})["logits"]
            values[f"{name}/{kind}"] = [iou, logits]
            values[f"{name}/{kind}/masks"] = outlines(prediction.masks)
    made = sa1b.generate_masks(
        model,
        image,
        points_per_side=6,
        min_predicted_iou=0.0,
        min_stability=0.0,
        max_box_iou=0.9,
        crop_layers=1,
    )
    values["generated"] = {
        name: np.asarray(getattr(made, name)).tolist() for name in ("predicted_iou", "stability_score")
    }
    for source in ("ddp", "fsdp", "weights.pth"):
        for to in ("", "transformers", "safetensors"):  # transformers has no pixel features: refused
            target = f"{source}-{to}" if to else f"{source}.safetensors"
            done = kit.run(
                "convert", source, "--out", target, *(["--to", to] if to else []), "--json", code=None
            )
            values[f"convert/{source}/{to or 'a file'}"] = [done.code, written(Path(target))]
    two = [*SAM, "--optim.steps", "2", "--init"]
    starts = ("weights.pth", "fsdp/checkpoints/step-00000002")
    runs: Runs = {f"init/{one}": ("none", [*two, one]) for one in starts}
    runs["init/low rank"] = ("none", [*two, "weights.safetensors", "--model.lora-rank", "2"])
    return values | all_figures("weights", runs, (yield runs))


def written(path: Path) -> Values:
    """Name -> digest of the tensors of each file of weights; None of other files."""
    found: Values = {}
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        read = {".safetensors": load_file, ".pth": lambda name: torch.load(name, weights_only=True)}.get(
            file.suffix
        )
        found[str(file.relative_to(path))] = digest(read(file)) if read else None
    return found


def random_values() -> Section:
    """Drop path, flip, and the prompts of all iterations."""
    drop = [*SAM, *words("--model.drop-path 0.6 --optim.steps 3")]
    clicks = words(
        "--recipe.clicks 2 --recipe.unprompted 2 --recipe.box-probability 0.5 --seed 7 --optim.steps 2"
    )
    other = words(
        "--recipe.box-noise-kind uniform --recipe.box-masks one --recipe.iou-loss absolute --recipe.iteration-loss sum "
        "--recipe.feedback-gradient --recipe.iou-masks best --recipe.focal-gamma 2 --recipe.all-masks-share 0 "
        "--data.strategy area --data.min-pixels 4"
    )
    runs: Runs = {
        "drop path/seed 0": ("none", drop),
        "drop path/seed 1": ("none", [*drop, "--seed", "1"]),
        "mirrored": ("none", [*SAM, "--data.flip", "1", "--optim.steps", "2"]),
        "clicks": ("none", [*SAM, *clicks, "--checkpoint.every", "1"]),
        "other recipe": ("none", [*SAM, *clicks, *other, "--checkpoint.every", "1"]),
    }
    values = all_figures("random values", runs, (yield runs))
    for name in ("clicks", "other recipe"):
        run = out(f"random values/{name}")
        for step, more in ((1, []), (2, ["--weights", run])):
            values[f"{name}/replayed step {step}"] = kit.run(
                "replay", run, "--step", step, "--json", *more
            ).json["samples"]
    mirrored = kit.run("replay", out("random values/mirrored"), "--step", 2, "--json").json["samples"]
    values["mirrored/replayed"] = [[one["image_id"], one["mirrored"], one["sha256"]] for one in mirrored]
    return values


def interactive() -> Section:
    """The class that computes losses and scores, on cropped and mirrored images."""
    yield {}
    values: Values = {}
    source = sa1b.load_model("weights.safetensors")
    options = {"global_batch": 4, "image_size": 64, "masks": 4, "rank": 0, "world_size": 1}
    for resize in ("pad", "crop"):
        stream = sa1b.Stream("root", resize=resize, flip=0.5, seed=3, damage_log="damage", **options)
        batch = next(iter(sa1b.Loader(stream, threads=1, dense=16, quiet=True)))
        for clicks in (1, 3):
            recipe = Recipe(clicks=clicks, unprompted=2)
            model = Sam(ModelConfig(**{**config(source), "drop_path": 0.5}))
            model.load_state_dict(source.state_dict())
            module = Interactive(model, recipe)
            module.traced = True
            inputs = module.inputs(batch, 11)
            found = module(*inputs)
            found["loss"].backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            key = f"{resize}, {clicks} clicks"
            values[f"{key}/outcome"] = {name: tensor.tolist() for name, tensor in found.items()}
            values[f"{key}/gradients"] = norms(gradients) if clicks == 3 else len(gradients)
            if clicks == 1:
                scored = module.eval()(*inputs, evaluate=True)
                names = ("intersections", "unions", "predicted_iou")
                values[f"{key}/scored"] = {name: scored[name].tolist() for name in names}
    return values


def config(model: Sam) -> Values:
    return {name: getattr(model.config, name) for name in model.config.__slots__}


def scores() -> Section:
    """Both protocols on a view, and COCO's annotations and detections."""
    kit.run("export", "root", "--to", "coco", "--view", "held", "--out", "coco")
    annotations = json.loads(Path("coco/annotations.json").read_text())["annotations"]
    boxes = [
        {"image_id": one["image_id"], "category_id": 1, "bbox": one["bbox"], "score": one["predicted_iou"]}
        for one in annotations
    ]
    Path("boxes.json").write_text(json.dumps(boxes))
    alone = [*SAM, "--evaluate-only", "--json", "--init", "weights.safetensors"]
    view = [*alone, "--evaluation.view", "held"]
    coco = [word for word in alone if word not in ("--data.root", "root")]
    coco += words("--evaluation.coco coco/annotations.json --evaluation.images coco/images")
    during = (
        "--optim.steps 2 --data.view train --evaluation.view held --evaluation.every 1 --evaluation.masks 3"
    )
    runs: Runs = {
        "uniform": ("none", [*view, "--evaluation.protocol", "uniform"]),
        "sam": ("none", [*view, "--evaluation.protocol", "sam"]),
        "sam, ddp": ("ddp", [*view, "--evaluation.protocol", "sam"]),
        "coco": ("none", coco),
        "detections": ("none", [*coco, "--evaluation.detections", "boxes.json"]),
        "during": ("none", [*SAM, *words(during), "--evaluation.show", "2"]),
    }
    ended = yield runs
    printed = {name: text for name, (_, text) in ended.items() if name != "during"}
    values: Values = {
        name: json.loads(text[text.index("{") : text.rindex("}") + 1]) for name, text in printed.items()
    }
    values |= all_figures("scores", {"during": runs["during"]}, ended)
    run = Path(out("scores/during"))
    values["during a run"] = [
        [line["step"], line["evaluation"]] for line in lines(run) if "evaluation" in line
    ]
    shown = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    masks = [mask for one in shown for mask in one["masks"]]
    values["predictions/masks"] = outlines([coco_mask.decode(mask["segmentation"]) for mask in masks])
    values["predictions"] = [
        [one["image_id"], *({**mask, "segmentation": mask["segmentation"]["size"]} for mask in one["masks"])]
        for one in shown
    ]
    return values


SCHEDULES = {  # the last but one and the last checkpoint are a step apart
    "step": "--optim.schedule step --optim.milestones 2 3 --optim.min-lr-ratio 0 --optim.layer-decay 0.8 --optim.lr 0.01 "
    "--optim.batch-scaling sqrt --optim.beta1 0.8 --optim.beta2 0.99 --optim.ema 0.9 --optim.steps 4 --checkpoint.every 3",
    "rsqrt": "--optim.schedule rsqrt --optim.timescale 2 --optim.cooldown 2 --optim.min-lr-ratio 0 --optim.layer-decay 0.8 "
    "--optim.freeze image_encoder prompt_encoder.mask_downscaling --optim.batch-scaling none --optim.grad-clip 0.1 "
    "--optim.steps 6 --checkpoint.every 5",
    "cosine": "--optim.min-lr-ratio 0.1 --optim.epsilon 0.001 --optim.grad-clip 0 --optim.epochs 1 --checkpoint.every 4",
}


def optimizer() -> Section:
    """Learning rates, groups of parameters, and weights, their running mean and optimizer state after the last step."""
    decay = words("--optim.weight-decay 0.5")
    runs: Runs = {name: ("none", [*SAM, *words(text), *decay]) for name, text in SCHEDULES.items()}
    values = all_figures("optimizer", runs, (yield runs))
    for name, text in SCHEDULES.items():
        run = Path(out(f"optimizer/{name}"))
        before, after = (tensors(path) for path in sorted((run / "checkpoints").glob("step-????????")))
        values[f"{name}/groups"] = groups(before, after, run, words(text))
        if name == "step":
            values[f"{name}/state"] = norms({key: x for key, x in after.items() if not key.endswith(".step")})
    return values


def groups(before: Mapping[str, Any], after: Mapping[str, Any], run: Path, flags: Sequence[str]) -> Values:
    """Factor on the learning rate and weight decay -> parameters, by the formula of AdamW for the last step."""

    def flag(name: str, default: float) -> float:
        return float(flags[flags.index(f"--optim.{name}") + 1]) if f"--optim.{name}" in flags else default

    steps = [line for line in lines(run) if "loss" in line]
    step, lr = steps[-1]["step"], steps[-1]["lr"]
    found: Values = {}
    weights = [key.removeprefix("model.") for key in after if key.startswith("model.") and has_gradient(key)]
    for name in weights:
        first, last = (state[f"model.{name}"].double() for state in (before, after))
        if f"optimizer.{name}.exp_avg" not in after:
            kind = "no optimizer state" + ("" if torch.equal(first, last) else ", changed")
        elif torch.equal(first, last):
            kind = "unchanged"
        else:
            assert int(after[f"optimizer.{name}.step"]) == step
            mean, square = (after[f"optimizer.{name}.{key}"].double() for key in ("exp_avg", "exp_avg_sq"))
            mean, square = (
                mean / (1 - flag("beta1", 0.9) ** step),
                square / (1 - flag("beta2", 0.999) ** step),
            )
            adam = mean / (square.sqrt() + flag("epsilon", 1e-8))
            fits = []
            for decay in (0.0, 0.5):
                change = adam + decay * first
                scale = float(((first - last) * change).sum() / change.square().sum())
                fits.append((float((first - scale * change - last).norm()), round(scale / lr, 2), decay))
            kind = f"factor {min(fits)[1]}, decay {min(fits)[2]}"
        found.setdefault(kind, []).append(name)
    return found


def commands() -> Section:
    """Exit codes, and fields of --json with their types."""
    values: Values = {}
    cases = {
        "seen": "seen ddp",
        "seen, images": "seen ddp --image 3 --image 999 --masks",
        "seen, before a step": "seen fsdp --before-step 1",
        "replay": "replay fsdp --step 2",
        "replay, no such step": "replay fsdp --step 3",
        "replay, worst": "replay ddp --worst 2 --by grad_norm",
        "replay, weights": "replay ddp --step 2 --weights ddp",
        "convert": "convert ddp --out converted.pth",
        "convert, no run": "convert root --out no.pth",
        "annotate": "annotate photos --weights ddp --out annotated --points-per-side 4",
        "annotate, no weights": "annotate photos --weights root --out no",
        "plan train": "plan train --gpu H100 --price 2 --preset tiny --data.root root",
        "plan train, no such view": "plan train --gpu H100 --preset tiny --data.root root --data.view no",
    }
    Path("photos").mkdir()
    for sample in list(sa1b.open("root"))[:2]:
        Path(f"photos/{sample.image_id}.jpg").write_bytes(sample.jpeg)
    for name, text in cases.items():
        done = kit.run(*words(text), "--json", code=None)
        values[name] = [done.code, shape(done.json) if done.out else None]
    seen = kit.run("seen", "ddp", "--out", "seen.parquet", "--json").json
    values["images that were seen"] = {name: value for name, value in seen.items() if name != "run"}
    for run in OLD:
        for step in (1, 2):
            values[f"replayed/{run}/{step}"] = kit.run("replay", run, "--step", step, "--json").json[
                "samples"
            ]
    ended = yield {
        "dry run": ("none", [*SMALL, "--dry-run"]),
        "dry run as JSON": ("none", [*SMALL, "--dry-run", "--json"]),
        "no such view": ("none", [*SAM, "--data.view", "no"]),
    }
    for name, (code, text) in ended.items():
        values[name] = [code, [] if code else [line.split("  ")[0] for line in text.splitlines()]]
    return values


SECTIONS: dict[str, Callable[[], Section]] = {
    "losses": losses,
    "old runs": old_runs,
    "weights": weights,
    "random values": random_values,
    "interactive": interactive,
    "scores": scores,
    "optimizer": optimizer,
    "commands": commands,
}


def sections(folder: Path, work: Path) -> dict[str, Callable[[], Values]]:
    """Do the runs of all sections, in a new folder; section -> a function that returns its values."""
    work = work.absolute()
    work.mkdir(parents=True)
    with tarfile.open(folder / "inputs.tar.xz") as archive:
        archive.extractall(work, filter="data")
    torch.set_num_threads(1)
    begun = {name: section() for name, section in SECTIONS.items()}
    with chdir(work):
        runs = {name: next(section) for name, section in begun.items()}
    ended = trained({f"{name}/{run}": how for name, of in runs.items() for run, how in of.items()}, work)

    def values(name: str) -> Values:
        with chdir(work):
            try:
                begun[name].send({run: ended[f"{name}/{run}"] for run in runs[name]})
            except StopIteration as end:
                return {f"{name}/{key}": rounded(value) for key, value in end.value.items()}
        raise AssertionError(f"{name} yields twice")

    return {name: partial(values, name) for name in SECTIONS}


def record(folder: Path, scratch: Path) -> Values:
    return {
        key: value
        for values in sections(folder, scratch / "work").values()
        for key, value in values().items()
    }


def make(folder: Path) -> None:
    """Write FOLDER/inputs.tar.xz."""
    folder.mkdir(exist_ok=True)
    work = folder.absolute() / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with chdir(work):
        kit.run(*words("synthesize tars --tars 1 --images-per-tar 14 --long-side 160 --phrases --seed 5"))
        kit.run(*words("reshard tars/sa_000000.tar --out root --images-per-shard 7"))
        kit.run(*words("view root --held-out 30% --split train --name train"))
        kit.run(*words("view root --held-out 30% --split held-out --name held"))
        Path("tars/phrases.parquet").rename("phrases.parquet")
        shutil.rmtree("tars")
        ended = trained({old: (old, flags) for old, flags in OLD.items()}, work)
        assert all(code == 0 for code, _ in ended.values()), ended
        for old in OLD:  # as if it had been killed after step 2; with the figures of all steps
            Path(f"{old}.json").write_text(json.dumps(figures(Path(old))))
            shutil.rmtree(f"{old}/checkpoints/step-00000004")
            kept = [line for line in lines(Path(old)) if line.get("step", 0) <= 2]
            Path(old, "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        for end in ("safetensors", "pth"):
            kit.run("convert", "ddp", "--out", f"weights.{end}")
    with tarfile.open(folder / "inputs.tar.xz", "w:xz", preset=9) as archive:
        for path in sorted(work.iterdir()):
            archive.add(
                path, path.name, filter=lambda one: one.replace(uid=0, gid=0, uname="", gname="", deep=False)
            )
    shutil.rmtree(work)


if __name__ == "__main__":
    rank(sys.argv[1], json.loads(sys.argv[2]))
