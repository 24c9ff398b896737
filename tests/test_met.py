"""What users met: wrong, silent or lost. One test for each fault; its name has the number of the fault."""

import datetime
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import venv
from collections import Counter
from collections.abc import Collection
from decimal import Decimal
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

import sa1b
from sa1b.errors import UsageError
from tests import kit, processes
from tests.datasets import dataset, sources
from tests.kit import refused, run
from tests.processes import REPOSITORY
from tests.shards import tiny
from tests.train.command import FLAGS, add_views, lines, losses, make_root, start

__all__ = ["dataset", "sources"]
SIZE = {"height": tiny.SIZE[0], "width": tiny.SIZE[1]}
MASK = {"segmentation": [[5, 5, 30, 6, 20, 30]]}
DAY = datetime.datetime(2024, 1, 31, 12, 30)


def coco(folder: Path, images: list[Any], annotations: list[Any]) -> Path:
    """A file m.json with images a.jpg, b.jpg, c.jpg and images/a.jpg beside it."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("a.jpg", "b.jpg", "c.jpg", "images/a.jpg")):
        (folder / name).write_bytes(tiny.pair(number)[0])
    numbered = [{"id": number, **one} for number, one in enumerate(annotations, 1)]
    (folder / "m.json").write_text(json.dumps({"images": images, "annotations": numbered}))
    return folder / "m.json"


def mirror(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows of these columns, each with the JPEG of image 1, 2, ..., which its name states."""
    images = [{"bytes": tiny.pair(n)[0], "path": f"sa_{n}.jpg"} for n in range(1, len(rows) + 1)]
    named = [{"image": image, **row} for image, row in zip(images, rows, strict=True)]
    pq.write_table(pa.Table.from_pylist(named), path)
    return path


def provenance(root: Path) -> list[Any]:
    dataset = sa1b.open(root)
    return [dataset.annotation_file(row)["provenance"] for row in range(len(dataset))]


def messages(root: Path) -> str:
    return "".join(path.read_text() for path in root.rglob("refused.jsonl"))


def standard(text: str | bytes) -> Any:
    """JSON without NaN and Infinity."""
    return json.loads(text, parse_constant=pytest.fail)


def join(path: Path, *names: str) -> list[str]:
    return [word for name in names for word in ("--join", f"{name}={path}")]


def members(out: Path) -> dict[str, bytes]:
    with tarfile.open(*out.glob("*.tar")) as tar:
        return {one.name: tar.extractfile(one).read() for one in tar}  # type: ignore[union-attr]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A dataset directory of the images 1 and 2."""
    run("reshard", tiny.write_tar(tmp_path / "sa_000001.tar", tiny.pairs([1, 2])), "--out", tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.parametrize("ids", ["keep", "hash"])
def test_1_an_id_of_two_images_is_refused_and_two_entries_of_one_are_harmless(
    tmp_path: Path, ids: str
) -> None:
    entries = [{"id": 1, "file_name": "a.jpg"}, {"id": 2, "file_name": "b.jpg"}]
    found = [{"image_id": 1, **MASK}, {"image_id": 1, **MASK}]
    bad = coco(tmp_path / "bad", [*entries, {"id": 1, "file_name": "c.jpg"}], found), "--image-ids", ids
    why = "have the id 1 ('a.jpg', 'c.jpg')"
    refused("reshard", *bad, "--out", tmp_path / "root", names=why)
    assert not (tmp_path / "root").exists()
    good = coco(tmp_path / "good", [*entries, entries[0]], found)
    run("reshard", good, "--out", tmp_path / "root", "--image-ids", ids)
    assert sorted(len(one.annotations) for one in sa1b.open(tmp_path / "root")) == [0, 2]
    refused("layer", "add", tmp_path / "root", *bad, "--name", "x", names=why)


def test_2_an_object_of_lists_of_different_lengths_is_refused(tmp_path: Path) -> None:
    rows = []
    for number, tags in enumerate((None, ["outdoor"], []), 1):
        masks = tiny.document(number)["annotations"]
        rows.append({"annotations": {key: [one[key] for one in masks] for key in masks[0]} | {"tags": tags}})
    done = run("reshard", mirror(tmp_path / "a.parquet", rows), "--out", tmp_path / "root", "--json", code=3)
    assert done.json["refused"] == {"unreadable_json": 2}
    assert "segmentation 3" in messages(tmp_path / "root")
    assert "tags 1" in messages(tmp_path / "root")
    (one,) = sa1b.open(tmp_path / "root")
    assert (one.image_id, len(one.annotations)) == (1, 3)


@pytest.mark.parametrize("form", [dict, json.dumps], ids=["object", "text"])
def test_3_the_column_with_masks_is_read_and_a_caption_is_none(tmp_path: Path, form: Any) -> None:
    captions = [{"json": form({"caption": f"cat {n}"})} for n in (1, 2)]
    alone = mirror(tmp_path / "alone.parquet", captions)
    assert "--images-only" in run("reshard", alone, "--out", tmp_path / "none", code=1).out
    assert "'json' has no masks; pass --images-only" in messages(tmp_path / "none")
    run("reshard", alone, "--out", tmp_path / "images", "--images-only")
    both = [row | {"annotations": tiny.document(n)["annotations"]} for n, row in enumerate(captions, 1)]
    run("reshard", mirror(tmp_path / "both.parquet", both), "--out", tmp_path / "root")
    assert [len(one.annotations) for one in sa1b.open(tmp_path / "root")] == [3, 3]


def test_4_strings_of_a_table_stay_strings(root: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"image_id": 1, "one": "2024-01-01", "more": ["2024-01-01"]}\n')
    joined = join(tmp_path / "t.jsonl", "one", "more")
    run("export", root, "--to", "webdataset", "--out", tmp_path / "out", *joined)
    assert members(tmp_path / "out")["sa_1.one.txt"] == b"2024-01-01"
    assert json.loads(members(tmp_path / "out")["sa_1.more.json"]) == ["2024-01-01"]
    (tmp_path / "t.csv").write_text("image_id,word\n1,000\n2,2024-01-01\n")
    text = sa1b.Text(str(tmp_path / "t.csv"), "word")
    (batch,) = sa1b.Stream(root, global_batch=2, masks=1, text=text, epochs=1)
    assert dict(zip(batch.ids.tolist(), batch.extra["word"], strict=True)) == {1: "000", 2: "2024-01-01"}


def test_5_numbers_that_json_lacks_are_null(root: Path, tmp_path: Path) -> None:
    values = {"score": [np.nan, 0.5], "scores": [[np.nan, 1.0], [np.inf, 2.0]]}
    pq.write_table(pa.table({"image_id": [1, 2], **values}), tmp_path / "t.parquet")
    joined = join(tmp_path / "t.parquet", *values)
    run("export", root, "--to", "coco", "--out", tmp_path / "coco", *joined)
    images = standard((tmp_path / "coco/annotations.json").read_text())["images"]
    assert [(one["score"], one["scores"]) for one in images] == [(None, [None, 1.0]), (0.5, [None, 2.0])]
    source = (tmp_path / "coco/annotations.json", "--images", tmp_path / "coco/images")
    run("reshard", *source, "--out", tmp_path / "again")
    run("export", root, "--to", "webdataset", "--out", tmp_path / "web", *joined)
    found = members(tmp_path / "web")
    assert standard(found["sa_1.score.json"]) is None
    assert standard(found["sa_2.scores.json"]) == [None, 2.0]
    rows = [{"annotations": [{**one, "extra": {"a": np.nan}} for one in tiny.document(1)["annotations"]]}]
    run("reshard", mirror(tmp_path / "a.parquet", rows), "--out", tmp_path / "mirror")
    dataset = sa1b.open(tmp_path / "mirror")
    assert [one["extra"] for one in dataset.annotation_file(0)["annotations"]] == [{"a": None}] * 3
    large = [{"image_id": 1, **MASK, "weight": 77}, {"image_id": 1, **MASK, "score": 77}]
    large.append({"image_id": 1, "segmentation": [[77, 1, 2, 2, 3, 1]]})
    path = coco(tmp_path / "c", [{"id": 1, "file_name": "a.jpg"}], large)
    path.write_text(path.read_text().replace("77", "1e999"))
    done = run("reshard", path, "--out", tmp_path / "large", "--json", code=3)
    assert [one["weight"] for one in provenance(tmp_path / "large")[0]["masks"]] == [None]
    assert done.json["refused"] == {"bad_polygon": 1, "bad_score": 1}
    assert "a score is 'inf', not a number; write a number, or remove it" in messages(tmp_path / "large")


def test_6_dates_are_text_and_other_values_are_refused_by_their_column(root: Path, tmp_path: Path) -> None:
    documents = [tiny.document(n) for n in (1, 2)]
    for one, thumb in zip(documents, (None, b"\xff"), strict=True):
        one["image"] |= {"date_captured": DAY}
        one["annotations"][0]["thumb"] = thumb
    source = mirror(tmp_path / "a.parquet", [{"json": one} for one in documents])
    run("reshard", source, "--out", tmp_path / "mirror", code=3)
    assert "column 'json': bytes has no form in JSON" in messages(tmp_path / "mirror")
    image = sa1b.open(tmp_path / "mirror").annotation_file(0)["image"]
    assert image["date_captured"] == DAY.isoformat()
    of_column = {"day": [DAY.date()] * 2, "thumb": [b"\xff"] * 2, "price": [[Decimal("1.5")]] * 2}
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image_id": [1, 2], **of_column}), table)
    for to in ("coco", "webdataset"):
        words = ("export", root, "--to", to, "--out", tmp_path / to)
        for name in ("thumb", "price"):
            refused(*words, *join(table, name), names=f"--join {name}")
        assert not (tmp_path / to).exists()
        run(*words, *join(table, "day"))
    assert standard((tmp_path / "coco/annotations.json").read_text())["images"][0]["day"] == "2024-01-31"
    assert standard(members(tmp_path / "webdataset")["sa_1.day.json"]) == "2024-01-31"
    run("export", root, "--to", "parquet", "--out", tmp_path / "p", *join(table, "thumb"))


def test_7_a_text_is_found_by_the_name_of_its_image(tmp_path: Path) -> None:
    texts = {"1.a": "one", "1.mask.big": "three", "1.mask": "two", "1": "four", "10": "five"}
    files = {f"{name}.txt": text.encode() for name, text in texts.items()}
    files |= {f"{name}.jpg": tiny.pair(1)[0] for name in ("1", "1.mask", "10")}
    (tmp_path / "photos").mkdir()
    for name, data in files.items():
        (tmp_path / "photos" / name).write_bytes(data)
    run("reshard", tmp_path / "photos", "--images-only", "--out", tmp_path / "root")
    assert {one["file"]: one["texts"] for one in provenance(tmp_path / "root")} == {
        "1.jpg": ["one", "four"],
        "1.mask.jpg": ["three", "two"],
        "10.jpg": ["five"],
    }


def test_8_backslashes_are_folders_and_sizes_may_be_text(tmp_path: Path) -> None:
    text = {key: str(value) for key, value in SIZE.items()}
    entries = [{"id": 1, "file_name": "images\\a.jpg", **text}, {"id": 2, "file_name": "b.jpg"}]
    found = [{"image_id": 1, **MASK}]
    for ids in ("keep", "hash"):
        path = coco(tmp_path, entries, found)
        run("reshard", path, "--out", tmp_path / ids, "--image-ids", ids)
        run("layer", "add", tmp_path / ids, path, "--name", "more", "--image-ids", ids)
        (tmp_path / "names.txt").write_text("images/a.jpg\n" if ids == "hash" else "1\n")
        run("view", tmp_path / ids, "--ids", tmp_path / "names.txt", "--name", "one")
    bad = coco(tmp_path, [{**entries[0], "width": "64 px"}, entries[1]], found)
    run("reshard", bad, "--out", tmp_path / "bad", code=3)
    assert "annotated as '64 px' x 48" in messages(tmp_path / "bad")


def test_9_images_alone_of_parquet_have_the_ids_of_their_columns(tmp_path: Path) -> None:
    images = [{"bytes": tiny.pair(n)[0], "path": None} for n in (1, 2)]
    table = pa.table({"image": images, "image_id": [7, 9], "file_name": ["cats/a.jpg", "cats/b.jpg"]})
    for name, columns in (("ids", table), ("names", table.drop_columns(["image_id"]))):
        pq.write_table(columns, tmp_path / f"{name}.parquet")
        run("reshard", tmp_path / f"{name}.parquet", "--images-only", "--out", tmp_path / name)
    assert sa1b.open(tmp_path / "ids").table.image_id.tolist() == [7, 9]
    assert sorted(one["file"] for one in provenance(tmp_path / "names")) == ["cats/a.jpg", "cats/b.jpg"]
    (tmp_path / "names.txt").write_text("cats/b.jpg\n")
    done = run("view", tmp_path / "names", "--ids", tmp_path / "names.txt", "--name", "b", "--json")
    assert done.json["images"] == 1


def test_17_the_summary_has_images_and_masks_of_each_warning_and_the_files_about_them(tmp_path: Path) -> None:
    content = tiny.pairs([1, 2, 3], None)
    for number, odd in ((1, 2), (3, 1)):
        document = json.loads(content[number][1])
        for mask in document["annotations"][:odd]:
            mask["area"] += 1
        content[number] = content[number][0], tiny.encode(document)
    content.append(("./sa_4.jpg", b""))
    root = tmp_path / "root"
    out = run("reshard", tiny.write_tar(tmp_path / "sa_000001.tar", content), "--out", root, code=3).out
    assert "warning: area" in out
    assert "2 images with 3 masks, kept" in out
    for file in ("refused", "warnings"):
        path = root / "quarantine" / "sa_000001" / f"{file}.jsonl"
        assert f": {path}\n" in out
        assert path.is_file()
    assert "<source>" not in out


ONE_STEP = ("--optim.steps", "1", "--optim.warmup", "0")
EVALUATED = ("--data.view", "train", "--evaluation.view", "held-out")


@pytest.fixture(scope="module")
def views_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the views "train" and "held-out", which share no image."""
    return add_views(make_root(tmp_path_factory.mktemp("met"), 16))


def test_10_a_large_step_of_grounding_starts_on_two_ranks_and_the_first_lack_of_memory_names_the_flag(
    views_root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    sizes = (
        "--model.image-size 384 --model.depth 4 --model.width 768 --model.heads 12 --model.global-blocks 1"
    )
    large = ("--preset", "grounding", *sizes.split(), "--data.global-batch", "6", *ONE_STEP)
    ended = start(views_root, out, *large, ranks=2, mode="ddp", model="grounding")
    assert ended.codes == [0, 0], ended.outputs
    assert len(losses(out)) == 1
    mishap = {"what": "raise", "error": "MemoryError", "step": 1}
    ended = start(views_root, tmp_path / "other", mishap=mishap)
    assert ended.codes == [1]
    assert "error: out of memory (no more); pass a smaller --data.micro-batch (now 2)" in ended.outputs[0]


def test_14_a_run_says_where_and_with_which_batch_it_trains_and_which_gpus_it_leaves_unused(
    views_root: Path, tmp_path: Path
) -> None:
    ended = start(views_root, tmp_path / "run", *ONE_STEP, ranks=2, mode="ddp")
    batch = "global batch 5 images = 2 ranks x 2 micro-batches of up to 2 images"
    said = f"2 ranks on 1 machine, each on cpu, mode ddp, precision fp32; {batch}"
    assert said in ended.outputs[0].splitlines()
    assert "global batch" not in ended.outputs[1]
    program = "import torch; torch.cuda.device_count = lambda: 8; from sa1b.cli import main; main()"
    flags = [
        "--data.root",
        views_root,
        "--out",
        tmp_path / "one",
        *FLAGS,
        *ONE_STEP,
        "--parallel.device",
        "cpu",
    ]
    flags += ["--data.global-batch", "4"]
    command = [sys.executable, "-c", program, "train", *flags]
    done = processes.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    batch = "global batch 4 images = 1 rank x 2 micro-batches x 2 images"
    unused = "not used: cuda:0 to cuda:7 (torchrun --nproc_per_node=8 starts a rank for each GPU)"
    assert (
        f"1 rank on 1 machine, on cpu, mode none, precision fp32; {batch}; {unused}"
        in done.stdout.splitlines()
    )


def test_15_scores_name_protocol_clicks_and_masks_of_an_image(views_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ended = start(views_root, out, *ONE_STEP, *EVALUATED)
    uniform = "protocol uniform, clicks at random pixels, at most 16 masks an image"
    said = re.findall(r"^(step 1|result): mIoU .* masks;.* (protocol .*)$", ended.outputs[0], re.MULTILINE)
    assert said == [("step 1", uniform), ("result", uniform)]
    (first,) = [line["evaluation"] for line in lines(out) if "evaluation" in line]
    how = {"protocol": "uniform", "clicks": "random pixels", "masks_per_image": 16}
    assert how.items() <= first.items()
    alone = (*EVALUATED, "--evaluate-only", "--evaluation.protocol", "sam", "--evaluation.masks", "3")
    ended = start(views_root, out, *alone)
    assert ended.outputs[0].endswith("; protocol sam, clicks at centres, at most 3 masks an image\n")
    scores = json.loads(start(views_root, out, *alone, "--json").outputs[0].splitlines()[-1])
    assert {"protocol": "sam", "clicks": "centres", "masks_per_image": 3}.items() <= scores.items()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_16_the_last_line_of_a_rank_names_checkpoint_and_command_before_torchrun_ends_with_1(
    views_root: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "run"
    flags = ["--data.root", views_root, "--out", out, *FLAGS, "--optim.steps", "100000"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [str(word) for word in (*launcher, "sa1b/train.py", *flags)]
    log = tmp_path / "log"
    with log.open("w") as file:  # a command of its own: /proc has its words
        given = {"cwd": REPOSITORY, "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)}}
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, **given)
    steps = out / "metrics.jsonl"
    while not (steps.exists() and steps.read_text().count("\n") > 2):
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    # Of torchrun, whose ranks end with 0. It imports nothing of the package, and a thread of torch rarely aborts it.
    assert process.wait(120) in (1, -signal.SIGABRT), log.read_text()
    said = re.findall(
        r"^stopped after step (\d+) and saved a checkpoint; (.*)$", log.read_text(), re.MULTILINE
    )
    ((step, rest),) = said
    checkpoint = f"{out}/checkpoints/step-{int(step):08d}"
    assert Path(checkpoint).is_dir()
    before = "unless torchrun starts the ranks again, " if number == signal.SIGTERM else ""
    assert rest == f"{before}run the same command to resume from {checkpoint}: {shlex.join(command)}"
    stop = (REPOSITORY / "docs/training.md").read_text().partition("\n### Stop\n")[2].partition("\n##")[0]
    assert "torchrun` ends with exit code 1" in stop.replace("\n", " ")


def test_23_a_run_that_its_patience_ended_says_so_when_it_starts_again(
    views_root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = (*EVALUATED, "--evaluation.every", "1", "--optim.lr", "1e-12", "--optim.steps", "100")
    flags += ("--evaluation.best", "miou_1_click", "--evaluation.patience", "2")
    assert start(views_root, out, *flags).codes == [0]
    again = start(views_root, out, *flags)
    assert again.codes == [0]
    why = "ended after step 2: 2 evaluations without a better score (--evaluation.patience)"
    assert again.outputs[0].splitlines() == [f"{out} {why}; raise it to train on"]
    assert len(losses(out)) == 2
    assert start(views_root, out, *flags[:-1], "3").codes == [0]
    assert len(losses(out)) == 3


FOUR = ("--data.global-batch", "4", "--optim.steps")


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("shards"), 24)


@pytest.fixture(scope="module")
def order(run_root: Path) -> list[int]:
    """The image of each position of a run."""
    stream = sa1b.Stream(run_root, global_batch=4, epochs=None)
    return [image for batch in islice(stream, 6) for image in batch.ids.tolist()]


def damaged(run_root: Path, out: Path, images: Collection[int]) -> Path:
    shutil.copytree(run_root, out)
    dataset = sa1b.open(out)
    for image, shard, offset in zip(
        *map(dataset.table.__getattribute__, ("image_id", "shard", "offset")), strict=True
    ):
        if image in images:
            kit.flip(out, dataset.shards[shard], int(offset) + 700)
    return out


def train(run_root: Path, run: Path, *flags: str, code: int = 0) -> str:
    ended = start(run_root, run, *flags, model="reconstruction")
    assert ended.codes == [code], ended.outputs
    return ended.outputs[0]


def damage(run: Path) -> list[tuple[int, int]]:
    """Position and image of each line of the damage log."""
    logged = map(json.loads, (run / "damaged.jsonl").read_text().splitlines())
    return [(line["position"], line["image_id"]) for line in logged]


def test_18_seen_counts_the_substitute_and_not_the_damaged_image(
    run_root: Path, order: list[int], tmp_path: Path
) -> None:
    run, mix, bad = tmp_path / "run", tmp_path / "mix.yaml", (order[1], order[6])
    roots = damaged(run_root, tmp_path / "root", bad), make_root(tmp_path / "other", 3)
    mix.write_text(f"sources: {{a: {{root: {roots[0]}, weight: 2}}, b: {{root: {roots[1]}, weight: 1}}}}\n")
    train(run_root, run, "--data.root", "", "--data.mix", str(mix), *FOUR, "3")
    assert {image for _, image in damage(run)} >= set(bad)
    with (run / "damaged.jsonl").open("a") as log:  # as earlier versions did, of an image that was prefetched
        log.write(f"{json.dumps({'position': 12, 'image_id': order[8]})}\n")
    steps = [kit.run("replay", run, "--step", step, "--json").json["samples"] for step in (1, 2, 3)]
    used = Counter((sample["source"], sample["image_id"]) for samples in steps for sample in samples)
    assert used.total() == 12
    assert not {image for source, image in used if source == "a"} & set(bad)
    kit.run("seen", run, "--out", tmp_path / "seen.parquet")
    rows = pq.read_table(tmp_path / "seen.parquet").to_pylist()
    assert {(row["source"], row["image_id"]): row["times"] for row in rows} == used
    for image in (*bad, *order[2:4]):
        found = kit.run("seen", run, "--image", image, "--json", code=None).json["images"]
        assert all(one["times"] == used[one["source"], image] for one in found)


def test_19_all_steps_of_a_run_are_seen_whatever_the_interval_of_its_lines(
    run_root: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(run_root, run, *FOUR, "7", "--logging.every", "5", "--checkpoint.every", "100")
    assert kit.run("seen", run, "--json").json["steps"] == 7
    last = kit.run("replay", run, "--step", 7, "--json").json["samples"]
    assert len(last) == 4
    kit.run("seen", run, "--image", last[0]["image_id"])
    assert [line["step"] for line in lines(run)] == [5, 7]


def test_20_a_step_of_a_schedule_is_the_same_step_after_a_change_of_the_batch(
    run_root: Path, tmp_path: Path
) -> None:
    run, mix = tmp_path / "run", tmp_path / "mix.yaml"
    text = f"sources: {{a: {{root: {run_root}, weight: 1}}, b: {{root: {run_root}, weight: 0}}}}\nschedule:\n"
    text += "- {from_step: 2, weights: {a: 1, b: 1}}\n- {from_step: 6, weights: {a: 0, b: 1}}\n"
    mix.write_text(text)
    flags = ("--data.root", "", "--data.mix", str(mix), "--data.global-batch")
    train(run_root, run, *flags, "4", "--optim.steps", "4")
    train(run_root, run, *flags, "8", "--optim.steps", "10")
    mix.write_text(
        f"{text}- {{from_position: 64, weights: {{a: 1, b: 0}}}}\n- {{from_step: 11, weights: {{a: 1, b: 1}}}}\n"
    )
    train(run_root, run, *flags, "4", "--optim.steps", "12")
    of_b = [0, *(round(24 * line["epochs/b"]) for line in lines(run))]
    steps = [after - before for before, after in pairwise(of_b)]
    assert steps == [0, 0, 2, 2, 4, 4, 8, 8, 8, 8, 0, 2]


def test_22_the_damage_of_a_run_is_that_of_the_positions_it_trained_on(
    run_root: Path, order: list[int], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    of_some = damaged(run_root, tmp_path / "some", [order[5], *order[8:13]])
    train(of_some, run, *FOUR, "2")
    assert {position for position, _ in damage(run)} == {5}
    train(of_some, run, *FOUR, "4")
    assert set(enumerate(order)) & set(damage(run)) == {(at, order[at]) for at in (5, *range(8, 13))}
    assert damage(run) == sorted(set(damage(run)), key=damage(run).index)
    of_all, stopped = damaged(run_root, tmp_path / "all", order), tmp_path / "stopped"
    output = train(of_all, stopped, *FOUR, "9", "--data.threads", "3", code=1)
    assert f"rank 0: {len(damage(stopped))} damaged samples, more than 10" in output


def test_11_a_plan_of_a_grounding_run_on_64_gpus_needs_no_texts() -> None:
    sizes = ("--data.global-batch", 256, "--data.micro-batch", 4)
    cluster = ("--gpu", "H100", "--nodes", 8, "--gpus", 8)
    plan = run("plan", "train", *cluster, "--preset", "grounding", *sizes, "--json").json
    assert (plan["ranks"], plan["micro_batch"], plan["micro_batches"], plan["fits"]) == (64, 4, 1, True)
    assert plan["memory_bytes"]["activations"] > 0
    # A batch that does not fit is a plan too, although smaller micro-batches would have another loss.
    cluster = ("--gpu", "A10", "--nodes", 1, "--gpus", 8)
    plan = run("plan", "train", *cluster, "--preset", "grounding", *sizes[:2], "--json", code=1).json
    assert (plan["micro_batch"], plan["micro_batches"], plan["fits"]) == (32, 1, False)


@pytest.mark.parametrize("workers", [0, 2])
def test_12_a_state_saved_in_a_loop_resumes_after_the_last_batch(dataset: Path, workers: int) -> None:
    def stream() -> sa1b.Stream:
        return sa1b.Stream(dataset, global_batch=2, masks=1, image_size=64)

    whole = [batch.ids.tolist() for batch in stream()]
    reading, seen = stream(), list[list[int]]()
    for batch in DataLoader(reading, batch_size=None, num_workers=workers):
        seen.append(batch.ids.tolist())
        state = reading.state_dict(batch)
        if workers:  # they do not tell the stream which of their batches were used
            with pytest.raises(UsageError, match=r"state_dict\(batch\)"):
                reading.state_dict()
        else:
            assert reading.state_dict() == state
        resumed = stream()
        resumed.load_state_dict(state)
        assert seen + [later.ids.tolist() for later in resumed] == whole or len(seen) == len(whole)
    assert seen == whole
    reading.set_epoch(1)
    assert reading.state_dict() == state
    for batch, _ in zip(sa1b.Loader(reading, threads=1, quiet=True), range(2), strict=False):
        assert reading.state_dict() == reading.state_dict(batch)


def test_13_doctor_compares_all_code_and_knows_nccl_timeout(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "sa1b", tmp_path / "sa1b")
    with (tmp_path / "sa1b/stream/order.py").open("a") as module:
        module.write("# another order\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "NCCL_TIMEOUT": "1800",
    }  # fmt: skip
    command = [sys.executable, "-m", "sa1b", "doctor", "--only", "versions", "--only", "environment"]
    ranks = [
        subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=variables | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(folder)},
        )
        for rank, folder in (("0", REPOSITORY), ("1", tmp_path))
    ]  # fmt: skip
    report, _ = (rank.communicate(timeout=300)[0] for rank in ranks)
    assert any("FAILED   versions" in line and " code " in line for line in report.splitlines()), report
    assert "Pass --parallel.timeout" in report
    assert "NCCL_IB_TIMEOUT" not in report


def test_21_the_default_micro_batch_is_the_whole_share_of_a_step(dataset: Path) -> None:
    def stream(batch: int, block: int, ranks: int, rank: int = 0, **more: object) -> sa1b.Stream:
        sizes = {"global_batch": batch, "block_size": block, "world_size": ranks, "rank": rank}
        return sa1b.Stream(opened, **sizes, masks=0, image_size=16, **more)

    opened = sa1b.open(dataset)
    sizes = [
        [len(batch) for batch, _ in zip(stream(12, 4, 2, rank, epochs=None), range(4), strict=False)]
        for rank in range(2)
    ]
    assert sizes == [[4, 4, 4, 4], [8, 8, 8, 8]]
    for block in (1, 2, 3, 4):
        for ranks in range(1, 6):
            for units in range(ranks, ranks + 5):
                one = stream(units * block, block, ranks)
                assert len(one) == one.steps_per_epoch, (units * block, block, ranks)
    sizes = ("--data.global-batch", 12, "--data.block-size", 4)
    plan = run("plan", "train", "--gpu", "H100", "--gpus", 2, "--preset", "tiny", *sizes, "--json").json
    assert (plan["micro_batch"], plan["micro_batches"]) == (8, 1)


def test_24_one_process_of_a_loader_takes_at_most_eight_threads_by_default(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    stream = sa1b.Stream(dataset, global_batch=2, masks=0, image_size=16)
    assert "processes 8, threads 2" in repr(sa1b.Loader(stream, quiet=True))
    assert ": threads 8, prefetch 2" in repr(sa1b.Loader(stream, processes=1, quiet=True))
    assert "threads 12" in repr(sa1b.Loader(stream, threads=12, quiet=True))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)))
    assert "threads 3" in repr(sa1b.Loader(stream, quiet=True))
    done = processes.run([sys.executable, "-m", "sa1b", "train", "--help"], capture_output=True, text=True)
    assert "at most 8" in " ".join(done.stdout.split()).partition("--data.threads")[2][:300]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment without packages, except pytest and what it needs."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments"):
        (packages / name).symlink_to(Path(pytest.__file__).parents[1] / name)
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    "words",
    [["tools/reshard.py"], ["tools/reshard.py", "tars", "--out", "shards"], ["sa1b/train.py"],
     ["-m", "sa1b.train", "--help"], ["-m", "sa1b", "reshard"], ["-m", "pytest", "benchmarks/"]],
    ids=" ".join,
)  # fmt: skip
def test_front_page_commands_name_the_set_up_where_nothing_is_installed(bare: Path, words: list[str]) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [bare, *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith("error: ")
    assert "`make demo`" in line


def test_front_page_training_without_arguments_takes_the_shards_of_the_demo(
    dataset: Path, tmp_path: Path
) -> None:
    command = [sys.executable, str(REPOSITORY / "sa1b/train.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: --data.root: missing; pass the folder that")
    shutil.copytree(dataset, tmp_path / "demo/shards")
    lines = list[str]()
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("learning rate"):
                break
        process.kill()
    assert lines[0].startswith("--preset tiny --data.root demo/shards: "), lines
    assert lines[-1].startswith("learning rate"), lines
