"""Mirrors of SA-1B in Parquet give the images, masks and values of the tars that they were made from."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import sa1b
from sa1b.errors import SourceError
from tests import kit
from tests.shards import tiny_source
from tests.shards.tiny import resharded as main
from tests.storage.hub import Hub
from tests.verify.checking import check as verify

SEGMENTATION = pa.struct([("size", pa.list_(pa.int64())), ("counts", pa.string())])
ANNOTATION = pa.struct(
    [
        ("area", pa.int64()),
        ("bbox", pa.list_(pa.float64())),
        ("crop_box", pa.list_(pa.float64())),
        ("id", pa.int64()),
        ("point_coords", pa.list_(pa.list_(pa.float64()))),
        ("predicted_iou", pa.float64()),
        ("segmentation", SEGMENTATION),
        ("stability_score", pa.float64()),
    ]
)
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mirrors")
    source = tiny_source.write_source(folder / "sa_000001.tar", tiny_source.pairs(range(100, 109)))
    return reshard(source, folder / "root")


def reshard(source: Path | str, out: Path, code: int = 0, **options: Any) -> Path:
    assert main((str(source),), out=str(out), json_output=True, **options) == code
    return out


def pairs(root: Path) -> list[tuple[int, bytes, Any]]:
    dataset = sa1b.open(root)
    return [(one.image_id, one.jpeg, dataset.annotation_file(row)) for row, one in enumerate(dataset)]


def objects(root: Path) -> pa.Table:
    """The form of `datasets` and of google/space: annotations are a list of objects."""
    rows = [
        {"image": {"bytes": jpeg, "path": f"sa_{image_id}.jpg"}, "annotations": document["annotations"]}
        for image_id, jpeg, document in pairs(root)
    ]
    return pa.Table.from_pylist(rows, pa.schema([("image", IMAGE), ("annotations", pa.list_(ANNOTATION))]))


def lists(root: Path) -> pa.Table:
    """The form of Sequence({...}) in `datasets` before version 4: an object of lists."""
    fields = [pa.field(one.name, pa.list_(one.type)) for one in ANNOTATION]
    rows = [
        {
            "image_id": image_id,
            "image": {"bytes": jpeg, "path": None},
            "width": document["image"]["width"],
            "height": document["image"]["height"],
            "annotations": {one.name: [mask[one.name] for mask in document["annotations"]] for one in fields},
        }
        for image_id, jpeg, document in pairs(root)
    ]
    kinds = [("image_id", pa.int64()), ("image", IMAGE), ("width", pa.int64()), ("height", pa.int64())]
    return pa.Table.from_pylist(rows, pa.schema([*kinds, ("annotations", pa.struct(fields))]))


def converted(root: Path) -> pa.Table:
    """The form of a webdataset that the Hub has converted."""
    rows = [
        {
            "jpg": {"bytes": jpeg, "path": None},
            "json": document,
            "__key__": f"./sa_{image_id}",
            "__url__": "x.tar",
        }
        for image_id, jpeg, document in pairs(root)
    ]
    return pa.Table.from_pylist(rows)


def texts(root: Path) -> pa.Table:
    """JSON files as texts."""
    rows = [{"jpg": jpeg, "json": json.dumps(document)} for _, jpeg, document in pairs(root)]
    return pa.Table.from_pylist(rows)


def values(root: Path) -> dict[int, tuple[Any, ...]]:
    columns = ("mask_id", "area", "bbox", "predicted_iou", "stability_score", "point_coords", "crop_box")
    return {
        one.image_id: (
            one.jpeg,
            one.masks().tobytes(),
            *(np.nan_to_num(one.annotations.column(name), nan=-1).tolist() for name in columns),
        )
        for one in sa1b.open(root)
    }


@pytest.mark.parametrize("form", [objects, lists, converted, texts])
def test_a_mirror_gives_what_its_tars_gave(
    root: Path, tmp_path: Path, form: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    table = form(root).append_column("split", pa.array(["train"] * form(root).num_rows))
    pq.write_table(table, tmp_path / "data" / "train-00000-of-00001.parquet", row_group_size=5)
    capsys.readouterr()
    found = reshard(tmp_path / "data", tmp_path / "mirror")
    assert json.loads(capsys.readouterr().out)["left_out"]["split"] == table.num_rows
    assert values(found) == values(root)
    assert not verify(found, deep=True).findings
    for path in (found / "tasks").iterdir():
        path.unlink()
    kit.run("index", found, "--json")
    assert values(found) == values(root)


def test_an_export_to_parquet_is_read_again(root: Path, tmp_path: Path) -> None:
    assert kit.called("export", root, to="parquet", out=tmp_path / "hub", json_output=True) == 0
    assert values(reshard(tmp_path / "hub", tmp_path / "again")) == values(root)


def test_rows_that_cannot_be_used_are_refused_and_kept(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = objects(root).to_pylist()
    png = io.BytesIO()
    Image.open(io.BytesIO(rows[0]["image"]["bytes"])).save(png, "PNG")
    rows[0]["image"]["bytes"] = png.getvalue()
    rows[1]["image"]["path"] = "street.jpg"
    rows[2]["image"] = None
    rows[3]["annotations"] = None
    rows[4]["image"] = {"bytes": rows[4]["image"]["bytes"][:-100], "path": f"part/{rows[4]['image']['path']}"}
    pq.write_table(pa.Table.from_pylist(rows, objects(root).schema), tmp_path / "a.parquet")
    capsys.readouterr()
    found = reshard(tmp_path / "a.parquet", tmp_path / "mirror", code=3)
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert refused == {"image_missing": 1, "jpeg_truncated": 1, "unexpected_name": 1, "jpg_unpaired": 1}
    lines = (found / "quarantine" / "a" / "refused.jsonl").read_text()
    assert f"{rows[4]['image']['path']}: JPEG" in lines
    kept = {path.read_bytes() for path in (found / "quarantine" / "a").iterdir()}
    assert {rows[1]["image"]["bytes"], rows[3]["image"]["bytes"]} <= kept
    dataset = sa1b.open(found)
    assert len(dataset) == len(rows) - 4
    first = dataset.annotation_file(dataset.row(int(rows[0]["image"]["path"][3:-4])))
    assert first["provenance"]["encoded"]["from"] == "PNG"


def test_files_without_annotations_or_images_are_no_sources(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = objects(root)
    for name, column in (("images", "annotations"), ("texts", "image")):
        pq.write_table(table.drop_columns([column]), tmp_path / f"{name}.parquet")
        capsys.readouterr()
        reshard(tmp_path / f"{name}.parquet", tmp_path / "mirror", code=1)
        out = capsys.readouterr().out
        assert (
            "without a column of image bytes or of annotations; for images without annotations, pass" in out
        )


def test_a_mirror_that_was_cut_or_has_another_ending_is_named(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(objects(root), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cut.parquet").write_bytes(data[: len(data) // 2])
    (tmp_path / "whole.pq").write_bytes(data)
    for path, message in (
        ("data", "cut.parquet: cannot be read as Parquet"),
        ("whole.pq", "no usable pair; a Parquet file; rename it, so that its name ends with .parquet"),
    ):
        capsys.readouterr()
        reshard(tmp_path / path, tmp_path / "mirror", code=1)
        assert message in "".join(json.loads(capsys.readouterr().out)["failed"].values())


def test_ids_that_pandas_wrote_as_numbers_with_a_point_are_ids(root: Path, tmp_path: Path) -> None:
    rows = [{**row, "image_id": float(row["image"]["path"][3:-4])} for row in objects(root).to_pylist()]
    nameless = [{**row, "image": {**row["image"], "path": "x.jpg"}} for row in rows]
    pq.write_table(pa.Table.from_pylist(nameless), tmp_path / "a.parquet")
    assert values(reshard(tmp_path / "a.parquet", tmp_path / "mirror")) == values(root)


def test_the_number_of_a_row_is_no_image_id(root: Path, tmp_path: Path) -> None:
    table = objects(root)
    nameless = pa.table(
        {"jpg": [one["bytes"] for one in table["image"].to_pylist()], "masks": table["annotations"]}
    )
    pq.write_table(nameless, tmp_path / "a.parquet")
    reshard(tmp_path / "a.parquet", tmp_path / "mirror", code=1)
    refused = (tmp_path / "mirror/quarantine/a/refused.jsonl").read_text()
    assert "no column image_id, file_name or __key__ has an id, and '000000000.jpg' is not of" in refused


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[Path, str, str]]:
    """A folder of a repository of the Hub, its URL, and the endpoint of a local server in the Hub's place."""
    pytest.importorskip("huggingface_hub")
    folder = tmp_path / "repository" / "data"
    folder.mkdir(parents=True)
    with Hub(folder.parent) as hub:
        yield folder, "hf://datasets/org/name/data", hub.url


def test_parquet_files_at_urls_are_sources(root: Path, tmp_path: Path, store: tuple[Path, str, str]) -> None:
    """As folders and as single files; images alone too."""
    folder, url, endpoint = store
    table = objects(root)
    pq.write_table(table.slice(0, 4), folder / "train-00000-of-00002.parquet")
    pq.write_table(table.slice(4), folder / "train-00001-of-00002.parquet")
    (folder / "README.md").write_text("")
    made = reshard(url, tmp_path / "all", endpoint=endpoint)
    assert pairs(made) == pairs(root)
    assert verify(made, deep=True, workers=0, quiet=True).exit_code() == 0
    one = reshard(f"{url}/train-00001-of-00002.parquet", tmp_path / "one", endpoint=endpoint)
    assert pairs(one) == pairs(root)[4:]
    reshard(url, tmp_path / "all", endpoint=endpoint)  # finished sources are recognised
    alone = sa1b.open(reshard(url, tmp_path / "alone", images_only=True, endpoint=endpoint))
    assert len(alone) == len(table)
    assert {one.jpeg for one in alone} == {jpeg for _, jpeg, _ in pairs(root)}


def test_what_cannot_be_read_at_a_url_is_named(
    root: Path, tmp_path: Path, store: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, url, endpoint = store
    with pytest.raises(SourceError, match="no tar and no Parquet file is there; pass the URL of one"):
        reshard(url, tmp_path / "out", endpoint=endpoint)
    pq.write_table(objects(root).select(["image"]), folder / "images.parquet")
    (folder / "cut.parquet").write_bytes(b"PAR1")
    reshard(url, tmp_path / "out", code=1, endpoint=endpoint)
    failed = json.loads(capsys.readouterr().out)["failed"]
    assert "images.parquet: has no column of annotations (json, " in failed["images"]
    assert "pass --images-only" in failed["images"]
    assert "cut.parquet: cannot be read as Parquet" in failed["cut"]
