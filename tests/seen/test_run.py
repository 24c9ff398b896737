"""`sa1b seen` and `sa1b replay` of real runs: images, masks and losses are those of the stream and of metrics.jsonl."""

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

import sa1b
from tests import kit
from tests.kit import refused
from tests.shards import tiny
from tests.train.command import add_views, lines, make_root, train_to_end

STEPS = 5  # two ranks train to step 3 and lose its checkpoint; one goes on after step 2
KEPT = ("--checkpoint.every", "1", "--checkpoint.keep-every", "1", "--recipe.clicks", "2")
CASES = {
    "view": ["--data.view", "train", "--data.strategy", "coverage", "--recipe.unprompted", "1"],
    "blocks": ["--data.block-size", "2", "--data.global-batch", "6", "--data.min-pixels", "2"],
    "mixture": ["--data.root", "", "--data.mix"],
}


@dataclass
class Trained:
    """A run, its dataset directories, and the batch of each of its steps, from the stream."""

    name: str
    run: Path
    roots: tuple[Path, Path]
    steps: list[sa1b.Batch]

    def moved(self, folder: Path) -> tuple[Path, Path]:
        """A copy of the run, and of its first dataset directory, which it names."""
        root, run = shutil.copytree(self.roots[0], folder / "copy"), folder / "run"
        run.mkdir()
        text = (self.run / "metrics.jsonl").read_text()
        (run / "metrics.jsonl").write_text(text.replace(f'"{self.roots[0]}"', f'"{root}"'))
        return Path(root), run


def stream_of(name: str, roots: tuple[Path, Path], log: Path) -> sa1b.Stream | sa1b.Mix:
    """The stream of a run, of one rank."""
    common = {"image_size": 64, "masks": 4, "flip": 0.5, "epochs": None, "damage_log": log}
    one = {**common, "global_batch": 5, "rank": 0, "world_size": 1}
    if name == "view":
        return sa1b.Stream(roots[0], view="train", strategy="coverage", **one)
    if name == "blocks":
        return sa1b.Stream(
            roots[0], block_size=2, min_pixels=2, min_pixels_size=16, **{**one, "global_batch": 6}
        )
    a, b = sa1b.Stream(roots[0], **one), sa1b.Stream(roots[1], seed=2, **{**one, "masks": 1})
    return sa1b.Mix({"a": (a, 3), "b": (b, 1)}, schedule={20: {"a": 1, "b": 2}})


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return add_views(make_root(tmp_path_factory.mktemp("a"), 16)), make_root(tmp_path_factory.mktemp("b"), 3)


@pytest.fixture(scope="module", params=CASES)
def trained(
    request: pytest.FixtureRequest, roots: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    name, folder, flags = request.param, tmp_path_factory.mktemp(request.param), CASES[request.param]
    run, mix = folder / "run", folder / "mix.yaml"
    if name == "mixture":
        sources = f"a: {{root: {roots[0]}, weight: 3}}, b: {{root: {roots[1]}, weight: 1, masks: 1, seed: 2}}"
        schedule = "[{from_step: 4, weights: {a: 1, b: 2}}]"
        mix.write_text(f"sources: {{{sources}}}\nschedule: {schedule}\n")
        flags = [*flags, str(mix)]
    train_to_end(roots[0], run, *KEPT, *flags, "--optim.steps", "3", ranks=2, mode="ddp")
    shutil.rmtree(run / "checkpoints/step-00000003")
    train_to_end(roots[0], run, *KEPT, *flags, "--optim.steps", str(STEPS))
    return Trained(name, run, roots, list(islice(stream_of(name, roots, folder / "log"), STEPS)))


def digests(batch: sa1b.Batch) -> dict[int, str]:
    """Position -> digest of the tensors of each sample, as of `sa1b replay --json`."""
    found, dense = {}, batch.masks.dense(16)
    for i, position in enumerate(batch.positions.tolist()):
        masks = batch.masks.image == i
        parts = (batch.boxes, batch.points, batch.mask_ids, batch.mask_index, dense)
        tensors = [batch.images[i].contiguous(), *(part[masks] for part in parts)]
        data = b"".join(tensor.numpy().tobytes() for tensor in tensors)
        found[position] = hashlib.sha256(data).hexdigest()
    return found


def replayed(run: Path, step: int, *words: object, code: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = kit.run("replay", run, "--step", step, *words, "--json", code=code).json
    return document


def shown(document: dict[str, Any]) -> dict[int, str]:
    return {sample["position"]: sample["sha256"] for sample in document["samples"]}


def used(trained: Trained, steps: int = STEPS) -> Counter[tuple[str, int]]:
    """How often each image of each source is in the first steps."""
    batches = trained.steps[:steps]
    names = [batch.source or (str(trained.roots[0]),) * len(batch.ids) for batch in batches]
    pairs = [zip(name, batch.ids.tolist(), strict=True) for name, batch in zip(names, batches, strict=True)]
    return Counter(pair for of_step in pairs for pair in of_step)


def test_images_and_masks_of_a_run_with_a_resume_are_those_of_its_stream(
    trained: Trained, tmp_path: Path
) -> None:
    run, times, out = trained.run, used(trained), tmp_path / "seen.parquet"
    document = kit.run("seen", run, "--out", out, "--json").json
    assert document["steps"] == STEPS
    rows = pq.read_table(out).to_pylist()
    assert {(row["source"], row["image_id"]): row["times"] for row in rows} == times
    for source in document["sources"]:
        counts = [count for (name, _), count in times.items() if name == source["source"]]
        assert (source["used"], source["distinct"], source["most"]) == (sum(counts), len(counts), max(counts))
        assert source["least"] == (min(counts) if len(counts) == source["images"] else 0)
    kit.run("seen", run, "--before-step", 2, "--out", tmp_path / "two.parquet")
    two = pq.read_table(tmp_path / "two.parquet").to_pylist()
    assert {(row["source"], row["image_id"]): row["times"] for row in two} == used(trained, 2)
    assert f"{run}: 2 steps\n" in kit.run("seen", run, "--before-step", 2).out
    every = [image for _, image in times]
    words = [word for image in (*every, 7) for word in ("--image", image)]
    images = kit.run("seen", run, *words, "--masks", "--json", code=1).json["images"]
    assert images[-1] == {"image_id": 7, "source": None, "times": 0}
    assert {(one["source"], one["image_id"]): one["times"] for one in images[:-1] if one["times"]} == times
    pairs = [
        (batch.source[i] if batch.source else str(trained.roots[0]), int(batch.ids[i]), mask)
        for batch in trained.steps
        for i, mask in zip(batch.masks.image.tolist(), batch.mask_ids.tolist(), strict=True)
    ]
    found = {
        (i["source"], i["image_id"], m["mask_id"]): m["times"] for i in images for m in i.get("masks", ())
    }
    assert found == Counter(pairs)
    kit.run("seen", run, "--masks", "--out", tmp_path / "masks.parquet")
    rows = pq.read_table(tmp_path / "masks.parquet").to_pylist()
    assert {(row["source"], row["image_id"], row["mask_id"]): row["times"] for row in rows} == Counter(pairs)
    kit.run("seen", run, "--image", every[0], "--out", tmp_path / "one.parquet")
    assert pq.read_table(tmp_path / "one.parquet")["image_id"].unique().to_pylist() == [every[0]]


def test_each_step_is_rebuilt_to_the_bit_and_its_losses_are_those_of_the_run(trained: Trained) -> None:
    logged = {line["step"]: line for line in lines(trained.run) if "loss" in line}
    for step, batch in enumerate(trained.steps, 1):
        weights = ("--weights", trained.run) if step > 1 else ()  # there is no checkpoint of step 0
        document, line = replayed(trained.run, step, *weights), logged[step]
        assert shown(document) == digests(batch)
        samples = {sample["position"]: sample for sample in document["samples"]}
        for i, position in enumerate(batch.positions.tolist()):
            sample = samples[position]
            source = batch.source[i] if batch.source else None
            assert (sample["image_id"], sample["source"]) == (int(batch.ids[i]), source)
            assert sample["mirrored"] == bool(batch.flipped[i])
            of_image = batch.mask_ids[batch.masks.image == i].tolist()
            assert [mask["mask_id"] for mask in sample["masks"]] == of_image
        first = [mask["prompts"][0] for sample in samples.values() for mask in sample["masks"]]
        assert {prompt["iteration"] for prompt in first} == {1}
        if step == 1:
            assert "those of the first iteration" in document["prompts"]
            continue
        assert "the weights that the step began with: all prompts are those of the run" in document["prompts"]
        masks = [mask for sample in samples.values() for mask in sample["masks"] if "loss" in mask]
        assert len(masks) == line["masks"]
        mean = {
            "loss": [mask["loss"] for mask in masks],
            "iou_first": [mask["ious"][0] for mask in masks],
            "iou_last": [mask["ious"][-1] for mask in masks],
        }
        for name, values in mean.items():
            assert sum(values) / len(values) == pytest.approx(line[name], rel=1e-5, abs=1e-6)
        worst, of_run = max(samples.values(), key=lambda sample: sample.get("loss", 0)), line["worst_image"]
        assert (worst["image_id"], worst["position"]) == (of_run["id"], of_run["position"])
        assert worst["loss"] == pytest.approx(of_run["loss"], rel=1e-5)


@pytest.mark.parametrize("trained", ["view"], indirect=True)
def test_the_tensors_of_samples_are_in_a_file(trained: Trained, tmp_path: Path) -> None:
    out, batch = tmp_path / "step.safetensors", trained.steps[1]
    document = replayed(trained.run, 2, "--weights", trained.run, "--out", out)
    with safe_open(out, framework="pt") as file:
        assert json.loads(file.metadata()["replay"]) == document
        for i, position in enumerate(batch.positions.tolist()):
            masks = batch.masks.image == i
            expected = {"image": batch.images[i], "masks": batch.masks.dense(16)[masks]}
            expected |= {
                name: getattr(batch, name)[masks] for name in ("boxes", "points", "mask_ids", "mask_index")
            }
            assert all(
                torch.equal(file.get_tensor(f"{position}/{key}"), one) for key, one in expected.items()
            )
    worst = tmp_path / "worst.safetensors"
    steps = kit.run("replay", trained.run, "--worst", 2, "--out", worst, "--json").json["steps"]
    with safe_open(worst, framework="pt") as file:
        assert {int(key.split("/")[0]) for key in file.keys()} == {step["position"] for step in steps}  # noqa: SIM118


@pytest.mark.parametrize("trained", ["view"], indirect=True)
def test_weights_of_another_step_or_run_are_named(trained: Trained, tmp_path: Path) -> None:
    checkpoint = trained.run / "checkpoints/step-00000001"
    only = "only the prompts of the first iteration are certainly those of the run"
    note = replayed(trained.run, 4, "--weights", checkpoint)["prompts"]
    assert (note.startswith(f"{checkpoint}: "), note.endswith(only)) == (True, True)
    copy = shutil.copytree(trained.run, tmp_path / "copy")
    note = replayed(trained.run, 4, "--weights", copy)["prompts"]
    assert note.endswith(f"weights of an unknown step; {only}")
    refused("replay", trained.run, "--step", 1, "--weights", tmp_path, names=str(tmp_path))
    worst = kit.run("replay", trained.run, "--worst", 2, "--weights", trained.run, "--json").json
    rebuilt = [(one["step"], *[sample["image_id"] for sample in one["samples"]]) for one in worst["images"]]
    assert rebuilt == [(one["step"], one["image_id"]) for one in worst["steps"]]


@pytest.mark.parametrize("trained", ["blocks", "mixture"], indirect=True)
def test_a_directory_that_has_grown_is_read_as_it_was(trained: Trained, tmp_path: Path) -> None:
    root, run = trained.moved(tmp_path)
    tiny.synthesize(tmp_path / "sa_000002.tar", images=5, first_id=500, long_side=64)
    tiny.ingest_tar(tmp_path / "sa_000002.tar", root, images_per_shard=7)
    kit.run("seen", run, "--out", tmp_path / "seen.parquet")
    rows = pq.read_table(tmp_path / "seen.parquet").to_pylist()
    counts = {(row["source"].replace(str(root), str(trained.roots[0])), row["image_id"]): row for row in rows}
    assert {key: row["times"] for key, row in counts.items()} == used(trained)
    document = replayed(run, 5)
    assert shown(document) == digests(trained.steps[4])
    assert "sources were added" in " ".join(document["changes"])


@pytest.mark.parametrize("trained", ["view"], indirect=True)
def test_what_has_changed_is_named_and_what_is_left_is_rebuilt(trained: Trained, tmp_path: Path) -> None:
    root, run = trained.moved(tmp_path)
    expected, metrics = digests(trained.steps[4]), run / "metrics.jsonl"
    text = metrics.read_text()
    changed = text.replace('"simplejpeg": "', '"simplejpeg": "0.').replace('"torch": "', '"torch": "0.')
    metrics.write_text(changed.replace('"decoder": "cpu-', '"decoder": "torchcodec-'))
    document = replayed(run, 5)
    assert shown(document) == expected
    for what in ("simplejpeg 0.", "torch 0.", "decoder torchcodec-"):
        assert what in " ".join(document["changes"])
    metrics.write_text(text.replace('"code": "', '"code": "0'))
    assert "code" in replayed(run, 5)["changes"][0]
    metrics.write_text(text)
    assert replayed(run, 5)["changes"] == []

    dataset, batch = sa1b.open(root), trained.steps[4]
    image = int(batch.ids[0])
    positions = batch.positions[batch.ids == image].tolist()
    row = dataset.table.image_id.tolist().index(image)
    shard, offset = dataset.shards[int(dataset.table.shard[row])], int(dataset.table.offset[row]) + 700
    kit.flip(root, shard, offset)
    document = replayed(run, 5)
    assert [at for at, digest in shown(document).items() if digest != expected[at]] == positions
    assert len(document["changes"]) == len(positions)
    assert all(f"position {at}: " in " ".join(document["changes"]) for at in positions)
    assert str(image) in document["changes"][0]
    log = "".join(json.dumps({"position": at, "image_id": image}) + "\n" for at in positions)
    (run / "damaged.jsonl").write_text(log)
    assert replayed(run, 5)["changes"] == []
    kit.flip(root, shard, offset)
    assert str(image) in replayed(run, 5)["changes"][0]
    (run / "damaged.jsonl").unlink()

    (root / shard).unlink()
    document = replayed(run, 5, code=3)
    assert shown(document).items() < expected.items()
    assert len(document["changes"]) == 5 - len(document["samples"]) > 0
    assert all("not rebuilt" in change and shard in change for change in document["changes"])


LOSSES = [3.0, 2.0, 1.0, 1.0, 2.6, None, 1.1, 0.9]
NORMS = [1.0, 1.0, 7.0, 1.0, 1.0, None, 1.0, 9.0]


@pytest.mark.parametrize(
    ("by", "expected"), [("loss", [6, 1, 5]), ("grad_norm", [6, 8, 3]), ("rise", [6, 5, 1])]
)
def test_the_worst_steps_are_listed_those_that_are_not_finite_first(
    by: str, expected: list[int], tmp_path: Path
) -> None:
    figures = zip(LOSSES, NORMS, strict=True)
    steps = [
        {
            "step": step,
            "lr": 1.0,
            "loss": loss,
            "worst_image": {"id": step, "position": 9, "loss": loss},
            "grad_norm": norm,
        }
        for step, (loss, norm) in enumerate(figures, 1)
    ]
    written = [{"run": {"step": 0}}, *steps, {"step": 8, "evaluation": {"miou": 0.1}}]
    text = "\n".join(map(json.dumps, written)) + '\n{"step": 9, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    words = ("replay", tmp_path, "--worst", 3, "--by", by)
    document = kit.run(*words, "--json").json
    assert [(step["step"], step["image_id"]) for step in document["steps"]] == [(n, n) for n in expected]
    assert (document["of"], document["steps"][0]["loss"]) == (8, None)
    assert "not finite" in kit.run(*words).out


@pytest.mark.parametrize("trained", ["view"], indirect=True)
def test_what_cannot_be_answered_is_refused(trained: Trained, tmp_path: Path) -> None:
    run, there = trained.run, tmp_path / "there"
    there.touch()
    refused("seen", run, "--before-step", STEPS + 1, names="--before-step")
    refused("seen", run, "--masks", names="--masks")
    refused("seen", run, "--out", there, names=f"--out {there}")
    refused("seen", trained.roots[0], names="metrics.jsonl")
    for words in ((), ("--step", 1, "--worst", 1)):
        refused("replay", run, *words, names="--step")
    for words in (("--step", STEPS + 1), ("--worst", 0)):
        refused("replay", run, *words, names=str(words[0]))
    refused("replay", run, "--step", 1, "--out", there, names=f"--out {there}")
    _, moved = trained.moved(tmp_path)
    text = (moved / "metrics.jsonl").read_text()
    for old, new in ((f"{tmp_path}/copy", "no/root"), ('"view": "train"', '"view": "no"')):
        (moved / "metrics.jsonl").write_text(text.replace(old, new))
        refused("seen", moved, names="no/root" if new == "no/root" else "no")
        refused("replay", moved, "--step", 1, names="no/root" if new == "no/root" else "no")
    (moved / "metrics.jsonl").write_text(text.replace(str(tmp_path / "copy"), str(trained.roots[1])))
    refused("seen", moved, names=str(trained.roots[1]))
    (moved / "metrics.jsonl").write_text(text.replace('"position": ', '"position": "x'))
    refused("seen", moved, names="metrics.jsonl")
