"""The mean IoU compared with plain numpy on the model's masks, and the feed of an evaluation."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sa1b
from sa1b.engine.evaluation import evaluate, held_out_feed
from sa1b.engine.ranks.parallel import wrap
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import DataConfig, EvaluationConfig, OptimConfig, ParallelConfig
from sa1b.engine.step.feed import Feed
from sa1b.engine.step.optim import freeze
from sa1b.engine.watch.control import Control
from sa1b.engine.watch.watchdog import Phases
from sa1b.errors import UsageError
from sa1b.masks import bbox, rasterize
from sa1b.recipes.presets import SamConfig
from sa1b.sam import clicks, prediction
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.protocol import centre
from sa1b.sam.recipe import Recipe
from sa1b.shards.predictions import read_predictions
from sa1b.stream.sample import choose
from sa1b.views.view import write_view
from tests.engine.launch import group, launch
from tests.engine.stream_root import IMAGE_SIZE, Micro, make_root, place_of, prepared

MODEL = ModelConfig(
    image_size=IMAGE_SIZE, width=32, depth=2, heads=2, global_blocks=(1,), window=2, channels=32
)
HELD_OUT = 7  # images; steps of 2, 3 or 4 always leave one image over


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with the disjoint views "train" and "held-out", and the view "both"."""
    root = make_root(tmp_path_factory.mktemp("evaluation"))
    table = sa1b.open(root).table
    for name, rows in {
        "train": range(HELD_OUT, len(table)), "held-out": range(HELD_OUT), "both": range(HELD_OUT + 2),
    }.items():  # fmt: skip
        write_view(root, table, np.array(rows, np.uint32), name=name)
    return root


def feed_for(root: Path, out: Path, rank_info: RankInfo, view: str = "held-out", **data: Any) -> Feed:
    settings = DataConfig(str(root), view="train", global_batch=4, masks=9, threads=1)
    settings = dataclasses.replace(settings, **data)
    training = Feed(settings, IMAGE_SIZE, rank_info, out, seed=0)
    evaluation = EvaluationConfig(view=view, masks=3)
    config = SamConfig(out=str(out), data=settings, model=MODEL, evaluation=evaluation)
    return held_out_feed(config, rank_info, training.stream)


def model() -> Interactive:
    torch.manual_seed(0)
    return Interactive(Sam(MODEL), Recipe())


def scored(
    root: Path,
    out: Path,
    rank_info: RankInfo,
    config: ParallelConfig,
    *,
    protocol: Any = "uniform",
    show: int = 0,
    **data: Any,
) -> dict[str, float]:
    feed = feed_for(root, out, rank_info, **data)
    module = wrap(model(), config, rank_info)
    return scores_of(module, feed, config, rank_info, out, protocol=protocol, show=show)


def scores_of(
    module: nn.Module,
    feed: Feed,
    config: ParallelConfig,
    rank_info: RankInfo,
    out: Path,
    *,
    protocol: Any = "uniform",
    show: int = 0,
) -> dict[str, float]:
    evaluation = EvaluationConfig(show=show, protocol=protocol)
    run = SamConfig(out=str(out), parallel=config, evaluation=evaluation)
    scores = evaluate(module, feed, run, rank_info, control=Control(rank_info), phases=Phases())
    assert scores is not None
    return scores


@torch.no_grad()
def drawn(sam: Sam, micro: Micro) -> tuple[np.ndarray, list[np.ndarray]]:
    """The true masks of a micro-batch, bool [M, R, R], and the model's masks for each of four prompts."""
    targets, raster = micro.targets, micro.targets.masks.shape[-1]
    embeddings = sam.embed(micro.images, None, targets.sizes)
    centres = (np.arange(raster) + 0.5) * IMAGE_SIZE / raster
    taken = targets.sizes[targets.image].numpy()
    inside = (centres < taken[:, :1])[:, :, None] & (centres < taken[:, 1:])[:, None, :]
    truth = targets.masks.numpy().astype(bool) & inside

    def answer(points: Tensor, labels: Tensor, before: Tensor | None) -> tuple[np.ndarray, Tensor]:
        logits, predicted = sam.decode(embeddings, targets.image, points, labels, before)
        # After the first prompt, the mask of 1 to 3 with the highest predicted IoU; later mask 0.
        best = predicted[:, 1:].argmax(dim=1) + 1 if before is None else torch.zeros_like(targets.image)
        chosen = logits[torch.arange(len(best)), best]
        return (chosen.numpy() > 0) & inside, chosen[:, None]

    points, labels = clicks.point_prompts(targets.points)
    masks, logits = answer(points, labels, None)
    found = [masks]
    for number in range(2, 6):
        click, label = clicks.corrective_clicks(
            torch.from_numpy(masks), torch.from_numpy(truth), targets.keys, number, IMAGE_SIZE
        )
        points, labels = torch.cat([points, click[:, None]], 1), torch.cat([labels, label[:, None]], 1)
        masks, logits = answer(points, labels, logits)
        found += [masks] if number in (3, 5) else []
    return truth, [*found, answer(*clicks.box_prompts(targets.boxes), None)[0]]


def numpy_scores(root: Path, out: Path) -> dict[str, float]:
    """IoU of each mask as a fraction of two counts, and the means by numpy."""
    sam = model().model.eval()
    ious: list[list[float]] = []
    empty = 0
    feed = feed_for(root, out, place_of())
    for micro in (prepared(batch, 0) for batch in feed):
        truth, answers = drawn(sam, micro)
        valid = micro.batch.positions < HELD_OUT
        for i, image in enumerate(micro.targets.image.tolist()):
            if truth[i].any() and valid[image]:
                pairs = [(one[i] & truth[i], one[i] | truth[i]) for one in answers]
                ious.append([both.sum() / either.sum() for both, either in pairs])
            elif valid[image]:
                empty += 1
    feed.close()
    means = np.array(ious).mean(axis=0).tolist()
    found = {
        f"miou_{prompt}": mean
        for prompt, mean in zip(("1_click", "3_clicks", "5_clicks", "box"), means, strict=True)
    }
    found["masks"] = len(ious)
    return found | {"damaged": 0, "empty": empty}


@pytest.fixture(scope="module")
def whole(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The scores of one process."""
    return scored(root, tmp_path_factory.mktemp("whole"), place_of(), ParallelConfig())


def test_it_is_the_mean_iou_that_numpy_finds(root: Path, tmp_path: Path, whole: dict[str, float]) -> None:
    assert whole["masks"] > HELD_OUT
    assert 0 < whole["miou_1_click"] < 1
    assert whole == pytest.approx(numpy_scores(root, tmp_path), abs=1e-8)


@pytest.mark.parametrize("data", [{"micro_batch": 1}, {"micro_batch": 3}, {"global_batch": 7}])
def test_micro_batches_do_not_change_a_digit(
    root: Path, tmp_path: Path, whole: dict[str, float], data: dict[str, int]
) -> None:
    assert scored(root, tmp_path, place_of(), ParallelConfig(), **data) == whole


def test_flips_and_runs_of_the_training_do_not_change_it(
    root: Path, tmp_path: Path, whole: dict[str, float]
) -> None:
    changed = scored(root, tmp_path, place_of(), ParallelConfig(), flip=1.0, strategy="area", block_size=4)
    assert changed == whole


def on_rank(root: Path, run: Path, mode: Any, protocol: str) -> dict[str, float]:
    with group(ParallelConfig(mode=mode)) as rank_info:
        return scored(root, run, rank_info, ParallelConfig(mode=mode), protocol=protocol)


@pytest.fixture(scope="module")
def published(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], Path]:
    """The scores of one process with the protocol sam, and its folder."""
    out = tmp_path_factory.mktemp("published")
    return scored(root, out, place_of(), ParallelConfig(), protocol="sam", show=3), out


def squares(root: Path, out: Path) -> dict[int, np.ndarray]:
    """The pixels of each held-out image as an evaluation decodes them: uint8 [image_size, image_size, 3]."""
    feed = feed_for(root, out, place_of())
    found = {}
    for batch in feed:
        images = np.ascontiguousarray(batch.images.permute(0, 2, 3, 1).numpy())
        found |= dict(zip(batch.ids.tolist(), images, strict=True))
    feed.close()
    return found


def test_by_the_protocol_sam_a_click_is_at_the_centre_and_iou_at_source_resolution(
    root: Path, published: tuple[dict[str, float], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, out = published
    dataset = sa1b.open(root)
    sam = model().model.eval()
    pixels = squares(root, tmp_path)
    ious: dict[str, list[float]] = {"1_click": [], "box": []}
    answers: dict[str, np.ndarray] = {}
    predictions = read_predictions(out / "predictions.jsonl")
    assert len(predictions) == 3
    for row in range(HELD_OUT):
        sample = dataset[row]
        chosen = chosen_masks(root, row)
        truth = rasterize(sample.runs, select=chosen, dtype=np.bool_)
        own = pixels[int(dataset.table.image_id[row])]
        monkeypatch.setattr(prediction, "framed_image", lambda *_, own=own: own)
        points = [centre(mask)[:2] for mask in truth]
        corners = bbox(sample.runs.select(chosen)).astype(float)
        corners[:, 2:] += corners[:, :2] - 1
        for name, prompts in (
            ("1_click", {"points": np.array(points)[:, None]}),
            ("box", {"boxes": corners}),
        ):
            masks = sa1b.predict(sam, sample.image, **prompts).masks
            answers[name] = masks
            ious[name] += ((masks & truth).sum((1, 2)) / (masks | truth).sum((1, 2))).tolist()
        if (shown := predictions.get(int(dataset.table.image_id[row]))) is not None:
            assert np.allclose(shown.points, np.array(points) + 0.5, atol=0.01)
            assert np.array_equal(rasterize(shown.runs, dtype=np.bool_), answers["1_click"])
            assert np.allclose(shown.iou, ious["1_click"][-len(points) :], atol=5.1e-5)  # of four digits
    for name, found in ious.items():
        assert scores[f"miou_{name}"] == pytest.approx(np.mean(found), abs=1e-8)
        assert scores[f"miou_{name}_oracle"] > scores[f"miou_{name}"]
    assert scores["masks"] == len(ious["box"])
    assert scores["masks"] == scores["masks_small"] + scores["masks_medium"] + scores["masks_large"]
    assert scores["empty"] == 0


def chosen_masks(root: Path, row: int) -> np.ndarray:
    """The masks of an image that an evaluation of three masks per image uses."""
    annotations = sa1b.open(root)[row].annotations
    return choose(annotations, annotations.runs_count > 1, 3, "uniform", 0, 0)


def test_an_evaluation_leaves_frozen_parts_in_evaluation_mode(root: Path, tmp_path: Path) -> None:
    module = model()
    freeze(module, OptimConfig(freeze=("image_encoder",)))
    modes = [part.training for part in module.modules()]
    scores_of(module, feed_for(root, tmp_path, place_of()), ParallelConfig(), place_of(), tmp_path)
    assert [part.training for part in module.modules()] == modes
    assert module.training
    assert not module.model.image_encoder.training


@pytest.mark.parametrize("data", [{}, {"micro_batch": 2}])
def test_images_are_computed_alone_because_larger_batches_round_differently(
    root: Path, tmp_path: Path, data: dict[str, int]
) -> None:
    feed = feed_for(root, tmp_path, place_of(), **data)
    assert [len(batch.ids) for batch in feed] == [1] * HELD_OUT
    feed.close()


@pytest.mark.parametrize(
    "mode", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"]
)  # one of four positions in a step is padding
def test_ranks_do_not_change_a_digit_by_the_protocol_sam(
    root: Path, tmp_path: Path, published: tuple[dict[str, float], Path], mode: str
) -> None:
    assert launch(on_rank, 2, root, tmp_path, mode, "sam") == [published[0]] * 2


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [
        ("ddp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_do_not_change_a_digit(
    root: Path, tmp_path: Path, whole: dict[str, float], mode: str, world_size: int
) -> None:
    assert launch(on_rank, world_size, root, tmp_path, mode, "uniform") == [whole] * world_size


def test_the_module_is_left_in_its_mode_and_the_same_comes_again(root: Path, tmp_path: Path) -> None:
    module, feed = model().train(), feed_for(root, tmp_path, place_of())
    first = scores_of(module, feed, ParallelConfig(), place_of(), tmp_path)
    assert module.training
    assert scores_of(module, feed, ParallelConfig(), place_of(), tmp_path) == first
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_view_that_shares_images_with_the_training_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--evaluation.view both: shares 2 images with the training data"):
        feed_for(root, tmp_path, place_of(), view="both")


@pytest.mark.parametrize("settings", [{"masks": 0}, {"every": -1}])
def test_what_makes_no_sense_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"--evaluation.{next(iter(settings))}"):
        EvaluationConfig(**settings)
