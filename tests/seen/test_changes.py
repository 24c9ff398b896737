"""What has changed since a run is named by `sa1b replay`, and what can still be rebuilt is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import sa1b
from sa1b.programs.seen.history import read_metrics, seen_images, spans
from sa1b.programs.seen.prompts import Prompts
from sa1b.programs.seen.replayed import Replayed, rebuilt
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards.commit import write_dataset
from sa1b.shards.manifest import read_tasks
from sa1b.version import __version__, code_digest
from tests.cli.verb import runner
from tests.seen.test_replay import trained
from tests.shards import tiny
from tests.train.command import make_root

STEP = 11  # of the last start
Expected = dict[int, str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("made"), 16)


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "root"))


def replayed(run: Path) -> Replayed:
    found = spans(str(run), read_metrics(str(run)), None)
    return rebuilt(str(run), found[-1], STEP, Prompts(str(run), found[-1], STEP, None))


def digests(found: Replayed) -> Expected:
    return {one["position"]: one["sha256"] for one in found.samples}


def change_starts(run: Path, **values: Any) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "run" in line:
            line["run"] |= values
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def damage(root: Path, image_id: int) -> None:
    """Overwrite bytes of an image in its shard."""
    dataset = sa1b.open(root)
    row = dataset.table.image_id.tolist().index(image_id)
    with (root / dataset.shards[int(dataset.table.shard[row])]).open("r+b") as file:
        file.seek(int(dataset.table.offset[row]) + 200)
        file.write(bytes(50))


@pytest.mark.parametrize("options", [{}, {"block_size": 2, "global_batch": 6}], ids=["shuffled", "blocks"])
def test_a_directory_that_has_grown_is_read_as_it_was(
    root: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    expected = trained(run, **{"root": str(root), "global_batch": 5, "masks": 3, **options})
    before = seen_images(spans(str(run), read_metrics(str(run)), None))
    synthetic.write_tar(tmp_path / "sa_000002.tar", images=5, first_id=500, long_side=64)
    tiny.ingest_tar(tmp_path / "sa_000002.tar", root, images_per_shard=7)
    write_dataset(root, read_tasks(root))
    found = replayed(run)
    assert digests(found) == expected[STEP]
    assert "sources were added since" in " ".join(found.changes)
    after = seen_images(spans(str(run), read_metrics(str(run)), None))
    assert [one.times.tolist() for one in after] == [one.times.tolist() for one in before]
    assert [one.ids.tolist() for one in after] == [one.ids.tolist() for one in before]


def test_other_code_and_libraries_are_named(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    expected = trained(run, root=str(root), global_batch=5, masks=3)
    change_starts(
        run, sa1b=__version__, code=code_digest(), libraries={"simplejpeg": "0.1", "gone": "1"}, torch="0.2"
    )
    found = replayed(run)
    (change,) = found.changes
    assert "simplejpeg 0.1, now " in change
    assert "torch 0.2, now " in change
    assert "gone" not in change
    assert digests(found) == expected[STEP]
    change_starts(run, sa1b="0.0.1", code="0" * 16)
    assert "the code that decides samples and prompts has changed" in replayed(run).changes[0]
    assert "sa1b 0.0.1" in replayed(run).changes[0]


def test_the_decoder_of_a_gpu_is_replaced_and_named(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, root=str(root), global_batch=5, masks=3)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"decoder": "cpu-', '"decoder": "torchcodec-'))
    found = replayed(run)
    assert "decoder torchcodec-2, now cpu-2" in found.changes[0]
    assert len(found.samples) == 5


def test_the_images_of_a_missing_shard_are_named_and_the_others_rebuilt(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    expected = trained(run, root=str(root), global_batch=5, masks=3)
    shard = sa1b.open(root).shards[0]
    (root / shard).unlink()
    found = replayed(run)
    assert 0 < len(found.samples) < 5
    assert digests(found).items() < expected[STEP].items()
    assert len(found.changes) == 5 - len(found.samples)
    assert all("not rebuilt" in change and shard in change for change in found.changes)
    assert found.table().startswith("warning: position ")
    assert runner("replay")(run, "--step", STEP).returncode == found.exit_code() == 3


def test_damage_that_differs_from_that_of_the_run_is_named(root: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    expected = trained(run, root=str(root), global_batch=5, masks=3)
    first = replayed(run).samples[0]
    position, image_id = first["position"], first["image_id"]
    damage(root, image_id)
    found = replayed(run)
    assert found.changes == [
        f"position {position}: image {image_id} is damaged now, and was not in the run: a substitute is shown"
    ]
    assert {at for at, digest in digests(found).items() if digest != expected[STEP][at]} == {position}
    (run / "damaged.jsonl").write_text(json.dumps({"position": position, "image_id": image_id}) + "\n")
    assert replayed(run).changes == []
    (run / "damaged.jsonl").write_text(json.dumps({"position": position + 1, "image_id": 7}) + "\n")
    assert f"position {position + 1}: image 7 was damaged in the run" in replayed(run).changes[1]


def test_a_source_of_a_mixture_that_is_gone_leaves_the_others(made: Path, root: Path, tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "mix.yaml"
    path.write_text(
        f"sources:\n  a: {{root: {root}, weight: 1}}\n  b: {{root: {made}, weight: 2, seed: 7}}\n"
    )
    expected = trained(run, mix=str(path), global_batch=5, masks=3)
    whole = replayed(run)
    assert digests(whole) == expected[STEP]
    (root / "dataset.json").unlink()
    found = replayed(run)
    assert {one["source"] for one in found.samples} == {"b"}
    assert digests(found) == {one["position"]: one["sha256"] for one in whole.samples if one["source"] == "b"}
    assert len(found.changes) == 5 - len(found.samples)
    assert all("not rebuilt" in change for change in found.changes)
