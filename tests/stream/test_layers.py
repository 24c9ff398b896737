"""Streams with layers: samples as if the shards had the changed masks, reads, resumed states and damage."""

import json
import pickle
import secrets
import subprocess
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import sa1b
from sa1b.engine.ranks.rank_info import RankInfo
from sa1b.engine.settings import DataConfig
from sa1b.engine.step.feed import Feed
from sa1b.errors import ManifestError, UsageError
from sa1b.shards import layer_writer
from sa1b.shards.annotation import PROVENANCE, Annotations, parse_annotation
from sa1b.shards.layer import Change, layer_names
from sa1b.shards.layer_writer import drop
from sa1b.storage.open import open_store
from sa1b.storage.reader import Range, Reader
from sa1b.stream.plan import ResumeError
from sa1b.verify.layer_check import verify_layer
from sa1b.views.predicate import mask_predicate
from sa1b.views.selection import Selection, select
from sa1b.views.view import write_view
from tests.layer import layered
from tests.shards import tiny
from tests.storage.service import Service
from tests.stream.recorded import digest

IDS = range(1, 13)
CHANGED = (2, 3, 7)


def parsed(document: Any) -> Annotations:
    return parse_annotation(tiny.encode(document), document["image"]["image_id"]).annotations


def write(root: Path | str, name: str, *changes: Change, overwrite: bool = False) -> Any:
    dataset = sa1b.open(root)
    with layer_writer.writing(open_store(root), name, overwrite=overwrite) as writer:
        for one in changes:
            writer.add(one, int(dataset.table.masks_crc32c[dataset.row(one.masks.image_id)]))
        return writer.commit(dataset.table, None, {"program": "test"})


def two(image_id: int) -> Change:
    """A mask that is added, one that is replaced, one that is hidden."""
    first, second = layered.mask_ids(image_id)[:2]
    masks = parsed(layered.masks(image_id, 5, second))
    return Change(masks, np.array([False, True]), np.array([first], np.int64))


def make_root(folder: Path, documents: dict[int, Any]) -> Path:
    folder.mkdir(parents=True)
    members = [
        member
        for image_id in IDS
        for member in tiny.pair_members(image_id, text=tiny.encode(documents[image_id]))
    ]
    tiny.ingest_tar(tiny.write_tar(folder / "sa_000020.tar", members), folder / "shards")
    return folder / "shards"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_root(tmp_path_factory.mktemp("layered") / "made", {one: tiny.document(one) for one in IDS})
    write(root, "round2", *map(two, CHANGED))
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-r", made, tmp_path / "shards"], check=True)
    return tmp_path / "shards"


def stream_of(root: Path | sa1b.Dataset, *layers: str, **options: Any) -> sa1b.Stream:
    folder = Path(root.root if isinstance(root, sa1b.Dataset) else root).parent
    if layers:
        options["layers"] = layers
    defaults = {"global_batch": 4, "micro_batch": 2, "image_size": 64, "damage_log": folder / "damage.jsonl"}
    return sa1b.Stream(root, **{**defaults, **options})


def digests(stream: Any) -> list[str]:
    return [digest(batch) for batch in stream]


@pytest.mark.parametrize(
    "options", [{}, {"order": "sequential"}, {"flip": 0.5, "masks": 2, "strategy": "area"}]
)
def test_a_stream_with_a_layer_is_that_of_shards_with_the_changed_masks(
    root: Path, tmp_path: Path, options: Any
) -> None:
    documents = {one: tiny.document(one) for one in IDS}
    for image_id in CHANGED:
        base, own = documents[image_id]["annotations"], two(image_id).masks.to_json()["annotations"]
        documents[image_id]["annotations"] = [own[1], base[2], own[0]]
    direct = make_root(tmp_path / "direct", documents)
    wanted = digests(stream_of(direct, **options))
    assert digests(stream_of(root, "round2", **options)) == wanted
    assert digests(stream_of(root, **options)) != wanted
    assert digests(stream_of(sa1b.open(root, layers=["round2"]), **options)) == wanted
    assert digests(DataLoader(stream_of(root, "round2", **options), batch_size=None, num_workers=2)) == wanted
    assert digests(pickle.loads(pickle.dumps(stream_of(root, "round2", **options)))) == wanted
    assert digests(sa1b.Loader(stream_of(root, "round2", **options))) == wanted


def test_only_images_of_the_layer_cost_a_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Range] = []
    real: Callable[..., Any] = Reader.submit

    def submit(self: Reader, item: Range) -> Any:
        reads.append(item)
        return real(self, item)

    monkeypatch.setattr(Reader, "submit", submit)
    digests(stream_of(root, "round2", order="sequential", micro_batch=1, global_batch=1))
    assert len([one for one in reads if one.name.endswith(".tar")]) == len(IDS)
    assert [one.name for one in reads if not one.name.endswith(".tar")] == ["layers/round2/masks.bin"] * 3
    assert all(one.crc is not None for one in reads)


@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_stream_with_a_layer_resumes_exactly(root: Path, done: int) -> None:
    first = stream_of(root, "round2", epochs=None)
    wanted = [digest(batch) for batch in islice(iter(first), 12)]
    stopped = stream_of(root, "round2", epochs=None)
    *_, last = islice(iter(stopped), 2 * done)
    state = json.loads(json.dumps(stopped.state_dict(last)))
    assert state["layers"] == [["round2", sa1b.open(root, layers=["round2"]).layers[0].info.digest]]
    resumed = stream_of(root, "round2", epochs=None)
    resumed.load_state_dict(state)
    assert [digest(batch) for batch in islice(iter(resumed), 12 - 2 * done)] == wanted[2 * done :]


def test_a_state_of_other_layers_is_refused(root: Path) -> None:
    write(root, "other", two(4))
    without, layered, other = stream_of(root), stream_of(root, "round2"), stream_of(root, "other")
    state = layered.state_dict()
    for stream, names in (
        (without, "no layer"),
        (other, "the layer other"),
        (stream_of(root, "round2", "other"), ""),
    ):
        with pytest.raises(
            ResumeError, match=rf"saved state with the layer round2 \(.*{names}.*; pass"
        ) as error:
            stream.load_state_dict(state)
        assert error.value.argument == "layers"
    with pytest.raises(ResumeError, match="saved state with no layer, this stream has the layer round2"):
        layered.load_state_dict(without.state_dict())
    assert "layers" not in without.state_dict()  # as in states of earlier versions
    write(root, "round2", two(2), overwrite=True)
    with pytest.raises(ResumeError, match="the masks differ"):
        stream_of(root, "round2").load_state_dict(state)


def test_damage_of_a_layer_is_substituted_in_training_and_invalid_in_evaluation(root: Path) -> None:
    path = root / "layers/round2/masks.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # of image 3
    path.write_bytes(data)
    training = list(stream_of(root, "round2"))
    assert 3 not in [image_id for batch in training for image_id in batch.ids.tolist()]
    evaluation = list(stream_of(root, "round2", order="sequential"))
    valid = {
        i: v for batch in evaluation for i, v in zip(batch.ids.tolist(), batch.valid.tolist(), strict=True)
    }
    assert [image_id for image_id, is_valid in valid.items() if not is_valid] == [3]
    lines = [json.loads(line) for line in (root.parent / "damage.jsonl").read_text().splitlines()]
    assert {line["image_id"] for line in lines} == {3}
    assert "layers/round2/masks.bin: record of image 3 at offset" in lines[0]["reason"]


def test_a_condition_on_masks_reads_the_categories_of_the_layer(root: Path) -> None:
    one = tiny.document(2, 9)
    one[PROVENANCE] = {"masks": [{"category": "cat"}, {"category": "dog"}, {"category": "cat"}]}
    for i, mask in enumerate(one["annotations"]):
        mask["id"] = i
    write(root, "named", Change(parsed(one), np.zeros(3, np.bool_), np.empty(0, np.int64)))
    rows = np.arange(len(IDS), dtype=np.uint32)
    write_view(
        root, sa1b.open(root).table, rows, masks_where=mask_predicate("category == 'cat'"), name="cats"
    )
    (batch,) = stream_of(root, "named", view="cats", order="sequential", global_batch=12, micro_batch=12)
    assert batch.mask_ids.tolist() == [0, 2]


def test_a_layer_that_is_missing_or_comes_too_late_is_named(root: Path) -> None:
    with pytest.raises(ManifestError, match="layers/round3/layer.json: no such layer"):
        stream_of(root, "round3")
    with pytest.raises(ValueError, match="the dataset is open already; pass them to sa1b.open"):
        stream_of(sa1b.open(root), "round2")
    with pytest.raises(ValueError, match="layers='round2' must be a list of names"):
        stream_of(root, layers="round2")


def test_training_names_the_flag_of_a_missing_layer(root: Path) -> None:
    rank_info = RankInfo(0, 1, 0, torch.device("cpu"))
    for options, message in (
        ({"layers": ("round3",)}, "--data.layers: .*no such layer"),
        ({"layers": ("../a",)}, "must be at most 64 letters"),
        ({"layers": ("round2",), "view": "none"}, "--data.view: "),
    ):
        config = DataConfig(root=str(root), global_batch=2, **options)
        with pytest.raises(UsageError, match=message):
            Feed(config, 64, rank_info, root.parent, 0)
    feed = Feed(DataConfig(root=str(root), global_batch=2, layers=("round2",)), 64, rank_info, root.parent, 0)
    assert feed.stream.state_dict()["layers"][0][0] == "round2"


@pytest.fixture
def url(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory, name = fsspec.filesystem("memory"), secrets.token_hex(4)
    memory.put(str(root), f"/{name}/shards", recursive=True)
    yield f"memory://{name}/shards"
    memory.rm(f"/{name}", recursive=True)


def test_layers_of_a_url_are_those_of_the_folder(root: Path, url: str, tmp_path: Path) -> None:
    options = {"damage_log": tmp_path / "damage.jsonl"}
    assert digests(stream_of(url, "round2", **options)) == digests(stream_of(root, "round2"))
    here, there = write(root, "new", two(4)), write(url, "new", two(4))
    assert there.digest == here.digest
    assert layer_names(open_store(url)) == {"new": True, "round2": True}
    assert digests(stream_of(url, "new", **options)) == digests(stream_of(root, "new"))
    drop(open_store(url), "new")
    assert layer_names(open_store(url)) == {"round2": True}
    with pytest.raises(ManifestError, match=f"{url}/layers/new/layer.json: no such layer"):
        stream_of(url, "new", **options)
    fsspec.filesystem("memory").rm_file(f"{url.removeprefix('memory:/')}/layers/round2/masks.bin")
    with pytest.raises(ManifestError, match=f"{url}/layers/round2/masks.bin: missing; restore"):
        stream_of(url, "round2", **options)


def test_layers_of_an_object_store_are_written_and_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    subprocess.run(["mkdir", "-p", tmp_path / "store" / "data"], check=True)
    subprocess.run(["cp", "-r", root, tmp_path / "store" / "data" / "shards"], check=True)
    stored = tmp_path / "store" / "data" / "shards" / "layers"
    url, options = "s3://data/shards", {"damage_log": tmp_path / "damage.jsonl"}
    with Service("object_server", tmp_path / "store") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        wanted = digests(stream_of(root, "round2"))
        assert digests(stream_of(url, "round2", **options)) == wanted
        assert write(url, "new", two(4)).digest == write(root, "new", two(4)).digest
        assert sorted(path.name for path in (stored / "new").iterdir()) == [
            "index.parquet", "layer.json", "masks.bin"
        ]  # fmt: skip
        assert digests(stream_of(url, "new", **options)) == digests(stream_of(root, "new"))
        assert verify_layer(url, "new", quiet=True).problems == []
        view = select(url, Selection(layers=("new",)), name="of-new", quiet=True).view
        assert digests(stream_of(url, view="of-new", **options)) == digests(stream_of(root, "new"))
        assert view.digest == select(root, Selection(layers=("new",)), quiet=True).view.digest
        path = stored / "new" / "masks.bin"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        (problem, *_) = verify_layer(url, "new", quiet=True).problems
        assert "s3://data/shards/layers/new/masks.bin: sha256" in problem
        drop(open_store(url), "new")
        assert not (stored / "new").exists() or not list((stored / "new").iterdir())
