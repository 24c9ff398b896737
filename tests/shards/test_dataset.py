"""Reading shards with `sa1b.open` and with other programs."""

import io
import json
import shutil
import tarfile
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
import simplejpeg
import webdataset

import sa1b
import sa1b.masks
from sa1b.errors import ManifestError, ShardError, TableError
from sa1b.shards import record
from tests.shards import tiny

IMAGES = 14


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, bytes]]:
    """Image id -> ending -> bytes in the source."""
    path = tmp_path_factory.mktemp("source") / "sa_000003.tar"
    tiny.synthesize(path, images=IMAGES, first_id=100, long_side=160)
    found: dict[int, dict[str, bytes]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile():
                stem, ending = member.name.removeprefix("./sa_").split(".")
                file = tar.extractfile(member)
                assert file is not None
                found.setdefault(int(stem), {})[ending] = file.read()
    found[-1] = {"path": str(path).encode()}
    return found


@pytest.fixture(scope="module")
def root(originals: dict[int, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("root")
    source = Path(originals.pop(-1)["path"].decode())
    tiny.ingest_tar(source, path, images_per_shard=5, keep_json=True)
    return path


def test_every_sample_reads_back_exactly(root: Path, originals: dict[int, dict[str, bytes]]) -> None:
    ds = sa1b.open(root)
    assert len(ds) == IMAGES
    assert [sample.image_id for sample in ds] == sorted(originals)
    for i, sample in enumerate(ds):
        original = originals[sample.image_id]
        assert sample.jpeg == original["jpg"]
        assert (sample.image == simplejpeg.decode_jpeg(original["jpg"])).all()
        found = ds.annotation_file(i)
        # The text is compared, so that values, types and key order are equal.
        assert json.dumps(found) == json.dumps(json.loads(original["json"]))
        strings = [mask["segmentation"]["counts"].encode() for mask in found["annotations"]]
        assert sa1b.masks.encode(sample.runs) == strings


def test_by_id_and_negative_rows(root: Path) -> None:
    ds = sa1b.open(root)
    assert ds.by_id(103).image_id == 103
    assert ds[-1].image_id == ds[IMAGES - 1].image_id
    with pytest.raises(KeyError, match="image 99 is not in"):
        ds.by_id(99)
    for impossible in (-1, 2**64, 10**30):
        with pytest.raises(KeyError, match="is not in"):
            ds.by_id(impossible)
    with pytest.raises(IndexError):
        ds[IMAGES]


def test_chosen_masks_alone(root: Path) -> None:
    annotations = sa1b.open(root)[0].annotations
    every, some = list(annotations.runs()), list(annotations.runs(np.array([3, 1])))
    assert [runs.tolist() for runs in some] == [every[3].tolist(), every[1].tolist()]


def test_opening_reads_only_the_manifest_and_the_table(root: Path, tmp_path: Path) -> None:
    for path in (root / "dataset.json", *root.glob("samples-*.bin")):
        shutil.copy(path, tmp_path)
    assert len(sa1b.open(tmp_path)) == IMAGES


def test_a_folder_that_is_no_root_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"no dataset there; pass the --out folder of `sa1b reshard`$"):
        sa1b.open(tmp_path)


def test_a_root_without_its_table_says_what_makes_it_again(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "dataset.json", tmp_path)
    with pytest.raises(
        TableError, match=rf"samples-\w+\.bin: missing; run `.*sa1b index {tmp_path}` to rebuild it"
    ):
        sa1b.open(tmp_path)


@pytest.mark.parametrize("what", ["jpg", "masks"])
def test_a_flipped_byte_is_named_with_shard_offset_and_image(root: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(root, tmp_path / "root")
    ds = sa1b.open(tmp_path / "root")
    offset = int(ds.table.offset[4]) if what == "jpg" else ds.table.masks_offset(4)
    shard = tmp_path / "root" / ds.shards[int(ds.table.shard[4])]
    with shard.open("r+b") as file:
        file.seek(offset + 10)
        byte = file.read(1)[0]
        file.seek(offset + 10)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(
        ShardError, match=f"sa_{ds.table.image_id[4]}.{what} is damaged: .*{shard.name}, bytes {offset:,} to"
    ):
        ds[4]
    assert ds[5].image_id  # the other files are not read


def test_a_cut_shard_is_named(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "root")
    ds = sa1b.open(tmp_path / "root")
    last = int(np.argmax(ds.table.shard * 10.0**9 + ds.table.offset))
    shard = tmp_path / "root" / ds.shards[int(ds.table.shard[last])]
    with shard.open("r+b") as file:
        file.truncate(int(ds.table.offset[last]) + 100)
    with pytest.raises(ShardError, match=rf"{shard.name}, bytes .* the object ends at byte .* truncated"):
        ds[last]


def test_plain_webdataset_reads_the_shards(root: Path) -> None:
    shards = [str(path) for path in sorted(root.glob("sa1b-*.tar"))]
    dataset = webdataset.WebDataset(shards, shardshuffle=False, empty_check=False)
    ds = sa1b.open(root)
    seen = set()
    for sample in dataset.decode("pil", sa1b.webdataset_decoder):
        image_id = int(sample["__key__"].removeprefix("sa_"))
        own = ds.by_id(image_id)
        assert sample["jpg"].size == own.pil.size
        assert sample["masks"].to_json() == sample["json"] == own.annotations.to_json()
        seen.add(image_id)
    assert len(seen) == IMAGES


def test_the_webdataset_decoder_leaves_other_members_alone_and_names_damage(root: Path) -> None:
    (sample, *_) = sa1b.open(root)
    stored = record.encode(sample.annotations)
    for key in (".masks", "masks", ".part.masks"):
        found = sa1b.webdataset_decoder(key, stored)
        assert found is not None
        assert found.to_json() == sample.annotations.to_json()
    for key in (".jpg", ".json", ".txt", "", ".unmasks", ".masks.json"):
        assert sa1b.webdataset_decoder(key, stored) is None
    with pytest.raises(record.RecordError):
        sa1b.webdataset_decoder(".masks", stored[:-5])


def test_pyarrow_reads_the_index(root: Path) -> None:
    ds = sa1b.open(root)
    for path in sorted(root.glob("sa1b-*.parquet")):
        table = pq.read_table(path)
        with tarfile.open(path.with_suffix(".tar")) as tar:
            offsets = {member.name: member.offset_data for member in tar}
        for row in table.to_pylist():
            sample = ds.by_id(row["image_id"])
            assert offsets[f"sa_{row['image_id']}.jpg"] == row["jpg_offset"] == sample.offset
            assert offsets[f"sa_{row['image_id']}.masks"] == row["masks_offset"]
            assert row["jpg_bytes"] == len(sample.jpeg)
            assert row["runs"] == [runs.tolist() for runs in sample.runs]
            assert row["runs_count"] == list(map(len, row["runs"]))
            for name in (
                "mask_id",
                "area",
                "bbox",
                "predicted_iou",
                "stability_score",
                "point_coords",
                "crop_box",
            ):
                assert row[name] == getattr(sample.annotations, name).tolist()


def test_the_index_alone_answers_questions_in_sql(root: Path) -> None:
    query = f"""
        SELECT count(*) FROM (
            SELECT unnest(stability_score) AS score, unnest(area) / (width * height) AS fraction
            FROM '{root}/sa1b-*.parquet')
        WHERE score >= 0.97 AND fraction < 0.01"""
    expected = 0
    for sample in sa1b.open(root):
        annotations = sample.annotations
        fraction = annotations.area / (annotations.width * annotations.height)
        expected += int(((annotations.stability_score >= 0.97) & (fraction < 0.01)).sum())
    assert expected > 0
    assert duckdb.sql(query).fetchall() == [(expected,)]


def test_a_shard_is_a_plain_ustar_with_nothing_that_varies(root: Path) -> None:
    for path in root.glob("sa1b-*.tar"):
        data = path.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            for member in tar:
                assert (member.mtime, member.uid, member.gid, member.mode) == (0, 0, 0, 0o644)
                assert data[member.offset + 257 : member.offset + 265] == b"ustar\x0000"


@pytest.mark.parametrize("wrong", ["0", 1.0, slice(2), None])
def test_indices_and_ids_are_integers(root: Path, wrong: Any) -> None:
    ds = sa1b.open(root)
    with pytest.raises(TypeError, match="must be an integer"):
        ds[wrong]
    with pytest.raises(TypeError, match="must be an integer"):
        ds.by_id(wrong)


def test_the_versions_need_no_installed_package(tmp_path: Path) -> None:
    version = metadata.version
    tiny.make_tar(tmp_path / "sa_000001.tar", [1])
    with patch.object(metadata, "version", lambda name: version({"sa1b": "missing"}.get(name, name))):
        task = tiny.ingest_tar(tmp_path / "sa_000001.tar", tmp_path / "root")
    assert task.versions["sa1b"] == sa1b.__version__
