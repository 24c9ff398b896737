"""Dataset directories without images: `sa1b reshard --annotations-only`."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import sa1b
from sa1b.errors import UsageError
from tests import kit
from tests.cli.verb import runner
from tests.shards import tiny

IDS = range(223750, 223770, 2)
reshard, verify, index, copy, export, plan = map(
    runner, ("reshard", "verify", "index", "copy", "export", "plan")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("annotations")
    tiny.make_tar(folder / "sa_000020.tar", IDS)
    for name, flags in (("with", ()), ("only", ("--annotations-only",))):
        done = reshard(
            folder / "sa_000020.tar", "--out", folder / name, "--images-per-shard", 4, "--keep-json", *flags
        )
        assert done.returncode == 0, done.stderr
    return folder


def test_all_annotations_are_stored_and_no_image(folder: Path) -> None:
    found, whole = sa1b.open(folder / "only"), sa1b.open(folder / "with")
    assert "annotations only" in repr(found)
    for one, other in zip(found, whole, strict=True):
        assert (one.image_id, one.jpeg) == (other.image_id, b"")
        assert json.dumps(one.annotations.to_json()) == json.dumps(other.annotations.to_json())
        np.testing.assert_array_equal(one.masks(), other.masks())
    names = []
    for shard in sorted((folder / "only").glob("*.tar")):
        with tarfile.open(shard) as tar:
            names += [member.name for member in tar]
    assert sorted(names) == sorted(f"sa_{i}.{ending}" for i in IDS for ending in ("masks", "json"))
    columns = pq.read_table(folder / "only" / "sa1b-000020-0000.parquet")
    same = pq.read_table(folder / "with" / "sa1b-000020-0000.parquet")
    assert set(columns["image_width"].to_pylist()) == set(columns["jpg_bytes"].to_pylist()) == {0}
    for name in ("image_id", "width", "area", "bbox", "runs", "masks_bytes", "masks_crc32c"):
        assert columns[name].equals(same[name]), name


def test_what_needs_no_pixels_works(folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(folder / "only", tmp_path / "root")
    done = verify(root, "--deep")
    assert done.returncode == 0
    assert done.stdout.startswith("note: annotations only")
    done = reshard(
        folder / "sa_000020.tar", "--out", root, "--images-per-shard", 4, "--annotations-only", "--keep-json"
    )
    assert done.returncode == 0
    assert "1 found finished" in done.stdout
    assert json.loads(runner("locate")(root, IDS[0], "--json").stdout)["images"][0]["jpg_bytes"] == 0
    assert runner("view")(root, "--images-where", "masks >= 1", "--name", "all").returncode == 0
    asked = runner("query")(root, "SELECT sum(masks) AS masks, sum(jpg_bytes) AS bytes FROM images", "--json")
    assert json.loads(asked.stdout) == [{"masks": 30, "bytes": 0}]
    done = copy(root, tmp_path / "copy", "--shards", "sa1b-000020-0000*")
    assert done.returncode == 0, done.stderr
    assert verify(tmp_path / "copy").returncode == 0
    # Indexes, task files, table and dataset.json are rebuilt from the shards alone, with their options.
    expected = {path.name: path.read_bytes() for path in root.glob("*.parquet")}
    options = json.loads((root / "dataset.json").read_bytes())["options"]
    assert options["annotations_only"] is True
    for path in (*root.glob("*.parquet"), *(root / "tasks").iterdir(), *root.glob("samples-*")):
        path.unlink()
    (root / "dataset.json").unlink()
    done = index(root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name: path.read_bytes() for path in root.glob("*.parquet")} == expected
    rebuilt = json.loads((root / "dataset.json").read_bytes())["options"]
    assert rebuilt == {**options, "images_per_shard": rebuilt["images_per_shard"]}
    assert verify(root).returncode == 0


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda root, _: sa1b.Stream(root, global_batch=2, image_size=64), "a stream"),
        (lambda root, _: sa1b.open(root)[0].image, "sa_223750"),
        (lambda root, _: sa1b.open(root)[0].pil, "sa_223750"),
        (lambda root, _: sa1b.open(root)[0].overlay(), "sa_223750"),
        (lambda root, out: kit.accepted("gallery", root, out=out / "page"), "a gallery"),
        (
            lambda root, out: kit.accepted("export", root, to="sa1b", out=out / "tars"),
            "an export.*--to coco",
        ),
        (
            lambda root, out: kit.accepted("view", root, images_where="image_width > 1", out=out),
            "use width and",
        ),
    ],
)
def test_a_use_of_pixels_names_the_flag(
    use: Callable[[Path, Path], object], what: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"(?s)(?=.*{what})(?=.*--annotations-only).*reshard"):
        use(folder / "only", tmp_path)
    assert not list(tmp_path.iterdir())


def test_annotations_are_exported(folder: Path, tmp_path: Path) -> None:
    """The files of an export are those of an export with images, without the images."""
    for to in ("coco", "folders"):
        for name in ("with", "only"):
            done = export(folder / name, "--to", to, "--out", tmp_path / to / name)
            assert done.returncode == 0, done.stderr
        assert "10 (only their annotations)" in done.stdout
        files = {
            name: {
                str(path.relative_to(tmp_path / to / name)): path.read_bytes()
                for path in (tmp_path / to / name).rglob("*.json")
                if path.name != ".export.jsonl"
            }
            for name in ("with", "only")
        }
        assert files["only"] == files["with"]
        assert len(files["only"]) == (2 if to == "coco" else 10)
        assert not list((tmp_path / to / "only").rglob("*.jpg"))
    done = export(folder / "only", "--to", "coco", "--out", tmp_path / "coco/only", "--json")
    assert json.loads(done.stdout)["skipped"] == ["annotations-0000"]


def test_the_plan_of_a_conversion(folder: Path) -> None:
    tar = folder / "sa_000020.tar"
    document = json.loads(plan(tar, "--annotations-only", "--json").stdout)
    assert document["annotations_only"] is True
    assert document["shard_bytes"] == int(0.06 * tar.stat().st_size)
    assert "without images" in plan(tar, "--annotations-only", "--out", folder / "only").stdout
    done = plan(tar, "--out", folder / "only")
    assert done.returncode == 2
    assert "was made with --annotations-only, this run has no --annotations-only" in done.stderr


def test_directories_with_and_without_images_are_not_mixed(folder: Path, tmp_path: Path) -> None:
    root, other = shutil.copytree(folder / "only", tmp_path / "only"), tmp_path / "other"
    tiny.make_tar(tmp_path / "sa_000021.tar", range(234937, 234941))
    done = reshard(tmp_path / "sa_000021.tar", "--out", other, "--images-per-shard", 4, "--keep-json")
    assert done.returncode == 0, done.stderr
    done = copy(folder / "with", root)
    assert done.returncode == 2
    assert "has sa_000020 with --annotations-only" in done.stderr
    for path in (*other.glob("sa1b-*"), *other.glob("tasks/*")):
        shutil.copy(path, root / path.relative_to(other))
    done = reshard("--out", root, "--finish")
    assert done.returncode == 1
    assert "FAILED sa_000021: sa_000021 was made with no --annotations-only, sa_000020 with" in done.stdout
    assert len(sa1b.open(root)) == 10
    for path in (root / "tasks", root / "dataset.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = index(root)
    assert done.returncode == 2
    assert "they differ in annotations_only (False, True)" in done.stderr


def test_a_notebook_shows_why_there_are_no_pixels(folder: Path) -> None:
    assert "annotations only" in sa1b.open(folder / "only")._repr_html_()


def test_the_flag_is_an_option_of_the_directory(folder: Path) -> None:
    tar = folder / "sa_000020.tar"
    for name, flags, message in (
        ("only", (), "was made with --annotations-only, this run has no --annotations-only"),
        ("with", ("--annotations-only",), "was made with no --annotations-only, this run has --annotations-only"),
        ("new", ("--annotations-only", "--image-size", 64), "--annotations-only: stores no images; omit --image-size 64"),
    ):  # fmt: skip
        done = reshard(tar, "--out", folder / name, "--images-per-shard", 4, "--keep-json", *flags)
        assert done.returncode == 2
        assert message in done.stderr
    # The documents of directories with images do not have the option.
    assert b"annotations_only" not in (folder / "with" / "dataset.json").read_bytes()


def test_damage_is_detected(folder: Path, tmp_path: Path) -> None:
    root = shutil.copytree(folder / "only", tmp_path / "root")
    shard = root / "sa1b-000020-0001.tar"
    data = bytearray(shard.read_bytes())
    data[600] ^= 1  # in the first mask record
    shard.write_bytes(data)
    done = verify(root)
    assert done.returncode == 1
    assert "masks_damaged" in done.stdout
    assert "jpg" not in done.stdout.replace("sa_", "")
    # A shard with images does not belong into the directory.
    shutil.copy(folder / "with" / shard.name, shard)
    done = verify(root)
    assert done.returncode == 1
    assert "member_order" in done.stdout
