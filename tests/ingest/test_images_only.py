"""Images without annotations: of folders and tars, with ids that do not change, refused where masks are needed."""

import hashlib
import io
import json
import os
import shutil
import tarfile
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
from PIL import Image

import sa1b
from sa1b.errors import SourceError, UsageError
from tests import kit
from tests.ingest.at_open import run_changing
from tests.shards.tiny import resharded as main
from tests.train.command import start
from tests.verify.checking import check as verify

view_main = partial(kit.called, "view")
FOLDER = Path(os.environ.get("SA1B_REAL_SAMPLES", Path(__file__).parents[3] / "shared" / "real"))
REAL = sorted(FOLDER.glob("*.jpg"))


def encoded(kind: str = "JPEG", shade: int = 0) -> bytes:
    y, x = np.mgrid[:40, :60]
    file = io.BytesIO()
    Image.fromarray(np.stack([4 * y, 3 * x, x + y + shade], axis=2).astype(np.uint8)).save(file, kind)
    return file.getvalue()


def hashed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 11


FILES = {
    "a.jpg": encoded(shade=1),
    "a.txt": b"a cat",
    "cats/1.JPEG": encoded(shade=2),
    "cats/deep/1.jpeg": encoded(shade=3),
    "sa_5.jpg": encoded(shade=4),
    "sa_5.json": b"{}",
    "png/p.png": encoded("PNG"),
    "._a.jpg": b"a file of another system",
}
IDS = {hashed(f"photos/{name}"): name for name in ("a.jpg", "cats/1.JPEG", "cats/deep/1.jpeg", "png/p.png")}
IDS[5] = "sa_5.jpg"


def written(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tar_of(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def reshard(source: Path, out: Path, *, code: int = 0, **options: Any) -> Path:
    assert main((str(source),), out=str(out), images_only=True, json_output=True, **options) == code
    return out


def rows_of(path: Path, files: dict[str, bytes], column: str = "image") -> Path:
    """Images as the library `datasets` writes them, beside other columns."""
    images = [
        {"bytes": data, "path": name} for name, data in files.items() if name[-4:] not in (".txt", "json")
    ]
    pq.write_table(pa.table({column: images, "label": list(range(len(images)))}), path, row_group_size=2)
    return path


@pytest.mark.parametrize("form", ["folder", "tar", "parquet"])
def test_every_image_is_stored_with_its_bytes_and_an_id_of_its_name(tmp_path: Path, form: str) -> None:
    make = {
        "folder": lambda: written(tmp_path / "photos", FILES),
        "tar": lambda: tar_of(tmp_path / "photos.tar", FILES),
        "parquet": lambda: rows_of(
            tmp_path / "photos.parquet", {k: v for k, v in FILES.items() if k[0] != "."}
        ),
    }
    dataset = sa1b.open(reshard(make[form](), tmp_path / "root"))
    rows = {int(one.image_id): row for row, one in enumerate(dataset)}
    found = {image_id: dataset[row] for image_id, row in rows.items()}
    assert found.keys() == IDS.keys()
    for image_id, name in IDS.items():
        assert dataset.annotation_file(rows[image_id])["provenance"]["file"] == name
        assert (found[image_id].jpeg == FILES[name]) == (not name.endswith(".png"))
        assert found[image_id].masks().shape == (0, 40, 60)
    converted = simplejpeg.decode_jpeg(found[hashed("photos/png/p.png")].jpeg).astype(int)
    assert abs(converted - np.asarray(Image.open(io.BytesIO(FILES["png/p.png"])))).mean() < 3
    assert not verify(tmp_path / "root", deep=True).findings


BESIDE = {
    "a.caption.txt": "Ein K\u00e4tzchen\n".encode(),
    "a.jpg": encoded(shade=1),
    "a.json": json.dumps({"caption": "a cat", "captions": ["a cat", "a kitten", 7], "width": 60}).encode(),
    "b.jpg": encoded(shade=2),
    "b.m/c.jpg": encoded(shade=3),
    "b.txt": b" \n",
    "d.txt": b"a text of no image",
    "e.jpg": encoded(shade=4),
    "e.json": b"{",
    "e.png": encoded("PNG"),
    "e.txt": b"a dog",
    "labels.json": b'{"1": "cat"}',
}
TEXTS = {
    "a.jpg": ["a cat", "a kitten", "Ein K\u00e4tzchen"],
    "b.jpg": [],
    "b.m/c.jpg": [],
    "e.jpg": ["a dog"],
    "e.png": ["a dog"],
}


def captioned_rows(path: Path) -> Path:
    images = [{"bytes": BESIDE[name], "path": name} for name in TEXTS]
    table = {
        "image": images,
        "caption": [texts[0] if texts else None for texts in TEXTS.values()],
        "captions": list(TEXTS.values()),
        "label": list(range(len(images))),
    }
    pq.write_table(pa.table(table), path, row_group_size=2)
    return path


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captioned")
    return reshard(written(folder / "photos", BESIDE), folder / "root", code=3)


@pytest.mark.parametrize("form", ["folder", "tar", "parquet"])
def test_the_texts_beside_an_image_are_stored_with_it(captioned: Path, tmp_path: Path, form: str) -> None:
    make = {
        "folder": lambda: captioned,
        "tar": lambda: reshard(tar_of(tmp_path / "photos.tar", BESIDE), tmp_path / "root", code=3),
        "parquet": lambda: reshard(captioned_rows(tmp_path / "photos.parquet"), tmp_path / "root"),
    }
    root = make[form]()
    dataset = sa1b.open(root)
    found = [dataset.annotation_file(row)["provenance"] for row in range(len(dataset))]
    assert {one["file"]: sorted(one["texts"]) for one in found} == {k: sorted(v) for k, v in TEXTS.items()}
    assert not verify(root, deep=True).findings


def test_texts_that_cannot_be_stored_are_refused_and_kept(captioned: Path) -> None:
    lines = (captioned / "quarantine/photos/refused.jsonl").read_text().splitlines()
    refused = {json.loads(line)["reason"]: line for line in lines}
    assert refused.keys() == {"text_unpaired", "text_unreadable"}
    assert "d.txt" in refused["text_unpaired"]
    assert "e.json" in refused["text_unreadable"]
    kept = {path.read_bytes() for path in (captioned / "quarantine" / "photos").iterdir()}
    assert {BESIDE["d.txt"], BESIDE["e.json"]} <= kept


def test_a_stream_gives_the_stored_texts_by_name(captioned: Path, tmp_path: Path) -> None:
    def read(**options: Any) -> dict[int, str | None]:
        stream = sa1b.Stream(captioned, masks=0, global_batch=1, image_size=32, epochs=1, **options)
        batches = sa1b.Loader(stream, quiet=True)
        return {int(batch.ids[0]): batch.extra["texts"][0] for batch in batches}

    with pytest.warns(UserWarning, match="has no texts for 2 of 5 images"):
        found = read(text="texts")
    for name, texts in TEXTS.items():
        assert found[hashed(f"photos/{name}")] in (texts or [None])
    with pytest.warns(UserWarning, match="has no texts for 2"):
        assert read(text=sa1b.Text("texts", length=3)) == found
    without = reshard(written(tmp_path / "x", {"a.jpg": BESIDE["a.jpg"]}), tmp_path / "root")
    with pytest.raises(sa1b.errors.Sa1bError, match=r"no image has a text .*\.txt and \.json"):
        sa1b.Stream(without, masks=0, global_batch=1, text="texts")


def test_queries_and_a_rebuild_of_the_index_keep_the_texts(captioned: Path, tmp_path: Path) -> None:
    root = shutil.copytree(captioned, tmp_path / "root")
    asked = "SELECT image_id, texts FROM images WHERE len(texts) > 1"
    expected = {hashed("photos/a.jpg"): sorted(TEXTS["a.jpg"])}

    def queried() -> dict[int, list[str]]:
        return {image_id: sorted(texts) for image_id, texts in kit.rows(root, asked)}

    assert queried() == expected
    (index,) = root.rglob("*.parquet")
    index.unlink()
    kit.run("index", root, "--json")
    assert queried() == expected


def test_exported_texts_are_read_again(captioned: Path, tmp_path: Path) -> None:
    dataset = sa1b.open(captioned)
    texts = [dataset.annotation_file(row)["provenance"]["texts"] for row in range(len(dataset))]
    expected = dict(zip(map(int, dataset.table.image_id), texts, strict=True))
    for to in ("parquet", "coco", "webdataset"):
        assert (
            kit.called("export", captioned, to=to, out=tmp_path / to, join=("texts",), json_output=True) == 0
        )
    assert {
        row["image_id"]: row["texts"]
        for row in pq.read_table(*(tmp_path / "parquet").glob("*.parquet")).to_pylist()
    } == expected
    document = json.loads((tmp_path / "coco" / "annotations.json").read_text())
    assert {one["id"]: one["texts"] for one in document["images"]} == expected
    for to, only in (("webdataset", True), ("parquet", False)):
        out = tmp_path / f"{to} again"
        assert main((str(tmp_path / to),), out=str(out), images_only=only, json_output=True) == 0
        again = sa1b.open(out)
        found = [again.annotation_file(row)["provenance"]["texts"] for row in range(len(again))]
        assert dict(zip(map(int, again.table.image_id), found, strict=True)) == expected


@pytest.mark.parametrize(("column", "value"), [("texts", ["changed"]), ("image_fields", "{}")])
def test_an_index_with_other_texts_or_fields_is_damage(
    captioned: Path, tmp_path: Path, column: str, value: Any
) -> None:
    root = shutil.copytree(captioned, tmp_path / "root")
    (index,) = root.rglob("*.parquet")
    table = pq.read_table(index)
    at, field = table.schema.get_field_index(column), table.schema.field(column)
    pq.write_table(table.set_column(at, field, pa.array([value] * len(table), field.type)), index)
    messages = {one.kind: one.message for one in verify(root, deep=True).findings}
    assert column in messages["index_numbers"]
    pq.write_table(table.drop_columns(["image_fields"]), index)  # of a version before this column
    assert "index_numbers" not in {one.kind for one in verify(root, deep=True).findings}


def test_a_stream_without_masks_reads_each_image_once(tmp_path: Path) -> None:
    root = reshard(written(tmp_path / "photos", FILES), tmp_path / "root")
    stream = sa1b.Stream(root, masks=0, global_batch=2, image_size=32, epochs=1)
    ids = [int(one) for batch in sa1b.Loader(stream, quiet=True) for one in batch.ids]
    assert sorted(ids) == sorted(IDS)


def test_what_is_no_image_is_refused_and_kept_and_other_files_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {
        "bad.jpg": FILES["a.jpg"][:-100],
        "x.png": b"no image",
        "notes.md": b"notes",
        "phone.HEIC": b"an image",
        "z/sa_5.jpg": FILES["a.jpg"],
    }
    reshard(written(tmp_path / "photos", FILES | bad), tmp_path / "root", code=3)
    summary = json.loads(capsys.readouterr().out)
    assert summary["refused"] == {"duplicate": 1, "image_unreadable": 1, "jpeg_truncated": 1}
    assert "notes.md" in json.dumps(summary["not_taken"])
    assert "convert it to JPEG, PNG or WebP" in json.dumps(summary["not_taken"])
    assert "neither an image nor a text beside one" in json.dumps(summary["not_taken"])
    kept = {path.read_bytes() for path in (tmp_path / "root" / "quarantine" / "photos").iterdir()}
    refused = (tmp_path / "root/quarantine/photos/refused.jsonl").read_text()
    assert "x.png: not an image that can be read: its format is unknown" in refused
    assert "z/sa_5.jpg: an earlier image of this source has this name, or its id, 5" in refused
    assert "bad.jpg: JPEG of" in refused  # not the name of the member that was made of it
    assert {bad["bad.jpg"], bad["x.png"], bad["z/sa_5.jpg"]} <= kept


def test_the_output_in_the_folder_of_images_and_folders_of_the_system_contain_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"x.png": b"no image", "@eaDir/a.jpg/THUMB.jpg": encoded(shade=9), "saved.JFIF": encoded(shade=8)}
    photos = written(tmp_path / "photos", FILES | more)
    reshard(photos, photos / "shards", code=3)
    assert (photos / "shards/quarantine/photos/000001-x.png").exists()
    capsys.readouterr()
    reshard(photos, photos / "shards", code=3)  # the same command again: nothing has changed
    assert json.loads(capsys.readouterr().out)["skipped"] == ["photos"]
    found = sa1b.open(reshard(photos, tmp_path / "again", code=3))
    assert {int(one.image_id) for one in found} == IDS.keys() | {hashed("photos/saved.JFIF")}
    summary = json.loads(capsys.readouterr().out)
    assert summary["refused"] == {"image_unreadable": 1}
    (photos / "saved.JFIF").unlink()
    reshard(photos, photos / "shards", code=1)
    assert "--replace, which removes its images that this source lacks" in capsys.readouterr().out
    tar_of(photos / "b.tar", FILES)
    with pytest.raises(SourceError, match="holds images and b.tar too"):
        reshard(photos, tmp_path / "other")
    with pytest.raises(
        SourceError, match="a.jpg: an image, not a source; name its folder, with --images-only"
    ):
        reshard(photos / "a.jpg", tmp_path / "other")
    why = "a dataset directory, not a source"
    assert summary["not_taken"] == [{"path": str(photos / "shards"), "reason": why}]


@pytest.mark.parametrize(("added", "code"), [("shards/quarantine/b/1.jpg", 3), ("new.jpg", 1)])
def test_the_output_of_another_source_in_the_folder_is_no_change_of_it(
    tmp_path: Path, added: str, code: int
) -> None:
    photos = written(tmp_path / "photos", {"a.jpg": FILES["a.jpg"]})
    written(photos / "shards", {".options.json": b"{}", "tasks/b.json": b"{}"})  # is listed as not taken: 3
    words = ["reshard", photos, "--images-only", "--out", tmp_path / "root"]
    done = run_changing(words, "a.jpg", photos / added, b"x")
    assert done.code == code, done.out + done.err
    assert (photos / added).exists()


def test_names_are_found_in_the_composed_and_the_decomposed_form_of_unicode(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "Größe é.jpg") for form in ("NFC", "NFD"))
    assert composed != decomposed
    photos = written(tmp_path / "photos", {decomposed: FILES["a.jpg"]})
    root = reshard(photos, tmp_path / "root")
    (tmp_path / "names.json").write_text(json.dumps([f"photos/{composed}"]))
    assert view_main(str(root), ids=str(tmp_path / "names.json"), name="one", json_output=True) == 0
    entries = {"images": [{"id": 7, "file_name": composed}], "annotations": []}
    (tmp_path / "masks.json").write_text(json.dumps(entries))
    assert main((str(tmp_path / "masks.json"),), out=str(tmp_path / "coco"), images=photos) == 0
    assert sa1b.open(tmp_path / "coco").table.image_id.tolist() == [7]


def test_rows_without_a_name_have_their_number_and_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "data", {"bad.parquet": b"PAR1 and no more"})
    pq.write_table(pa.table({"jpg": [FILES["a.jpg"], None], "key": [1, 2]}), folder / "plain.parquet")
    pq.write_table(pa.table({"pixels": [FILES["a.jpg"]]}), folder / "other.parquet")
    reshard(folder, tmp_path / "root", code=1)
    failed = json.loads(capsys.readouterr().out)["failed"]
    assert "cannot be read as Parquet" in failed["bad"]
    assert (
        "no column of image bytes among pixels; keep one: a struct of bytes and path, or a" in failed["other"]
    )
    dataset = sa1b.open(tmp_path / "root")
    assert [int(one.image_id) for one in dataset] == [hashed("plain/000000000.jpg")]
    assert "row 1: the row has no bytes" in (tmp_path / "root/quarantine/plain/refused.jsonl").read_text()


def test_a_run_without_the_flag_names_it(tmp_path: Path) -> None:
    web = tar_of(tmp_path / "web.tar", {"0.jpg": FILES["a.jpg"]})
    for source in (written(tmp_path / "photos", {"a.jpg": FILES["a.jpg"]}), web):
        done = kit.run("reshard", source, "--out", tmp_path / "root", code=1 if source == web else 2)
        assert "--images-only" in done.out + done.err
    with pytest.raises(SourceError, match="holds no image, no tar and no Parquet file"):
        reshard(written(tmp_path / "none", {"x/y": b"y"}), tmp_path / "root")


def test_the_flag_is_part_of_how_a_source_is_read_and_of_its_repair(tmp_path: Path) -> None:
    photos = written(tmp_path / "photos", FILES)
    root = reshard(photos, tmp_path / "root")
    with pytest.raises(UsageError, match="with --images-only True, this run has --images-only"):
        main((str(photos),), out=str(root))
    with pytest.raises(UsageError, match=r"--images-only: .*x\.json has annotations"):
        reshard(tmp_path / "x.json", root)
    (root / "tasks" / "photos.json").unlink()
    (root / "dataset.json").unlink()
    kit.run("index", root, "--json")
    shard = root / "sa1b-photos-0000.tar"
    shard.write_bytes(shard.read_bytes()[:-512])
    assert any("--redo photos --images-only" in one.remedy for one in verify(root).findings)
    reshard(photos, root, redo=("photos",))
    assert not verify(root, deep=True).findings


def test_training_that_learns_masks_is_refused_before_the_first_step(tmp_path: Path) -> None:
    root = reshard(written(tmp_path / "photos", FILES), tmp_path / "root")
    ended = start(root, tmp_path / "run")
    assert ended.codes == [2]
    assert "has no masks, and this model learns masks; label images with `sa1b annotate`" in ended.outputs[0]
    assert "or train a model that reads none: --preset distill" in ended.outputs[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not REAL, reason="real samples")
def test_photographs_keep_every_byte(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for path in REAL:
        shutil.copy(path, tmp_path / "photos")
    dataset = sa1b.open(reshard(tmp_path / "photos", tmp_path / "root"))
    assert sorted(one.jpeg for one in dataset) == sorted(path.read_bytes() for path in REAL)


@pytest.mark.parametrize("form", ["tar", "parquet"])
def test_small_members_and_columns_are_fields_and_the_others_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    images = {f"{i}": encoded(shade=i) for i in range(3)}
    if form == "tar":
        files: dict[str, bytes] = {}
        for name, data in images.items():
            about = {
                "url": f"http://x/{name}",
                "width": 60,
                "caption": "a cat",
                "exif": {"a": 1},
                "none": None,
            }
            files |= {
                f"{name}.cls": b"7\n",
                f"{name}.jpg": data,
                f"{name}.json": json.dumps(about).encode(),
                f"{name}.seg.npy": bytes(2000),
                f"{name}.id": b"\xff\x00",
            }
        source = tar_of(tmp_path / "train.tar", {**files, "classes.lst": b"cat", "big.bin": bytes(5000)})
        fields = {".cls": "7", "url": "http://x/0", "width": 60}
        left = {".bin": 1, ".id": 3, ".lst": 1, ".seg.npy": 3, "exif": 3}
    else:
        rows = [
            {
                "image": {"bytes": data, "path": f"{name}.jpg"},
                "label": 7,
                "score": 0.5,
                "nothing": float("nan"),
                "title": "a cat" if name == "0" else "x" * 3000,
                "text": "a cat",
                "embedding": [0.1, 0.2],
            }
            for name, data in images.items()
        ]
        source = tmp_path / "train.parquet"
        pq.write_table(pa.Table.from_pylist(rows), source)
        fields = {"label": 7, "score": 0.5, "title": "a cat"}
        left = {"embedding": 3, "nothing": 3, "title": 2}
    root = reshard(source, tmp_path / "out")
    printed = json.loads(capsys.readouterr().out)
    assert printed["left_out"] == left
    found = {
        one.annotations.to_json()["provenance"]["file"]: one.annotations.to_json()["provenance"]
        for one in sa1b.open(root)
    }
    assert found["0.jpg"]["fields"] == fields
    assert found["0.jpg"]["texts"] == ["a cat"]
    assert verify(root, deep=True, workers=0, quiet=True).exit_code() == 0
    main((str(source),), out=str(root), images_only=True)
    assert f"left out: {min(left)} " in capsys.readouterr().out
    name = next(iter(fields))
    asked = f"SELECT image_id, fields FROM images WHERE fields->>'{name}' = '7' ORDER BY image_id"
    columns = {one: json.loads(text) for one, text in kit.rows(root, asked)}
    assert columns[hashed("train/0.jpg")] == fields
    assert len(columns) == 3


@pytest.mark.parametrize("form", ["folder", "tar", "parquet"])
def test_only_the_images_of_a_table_are_taken_by_their_file_names(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make = {"folder": written, "tar": tar_of, "parquet": rows_of}[form]
    ending = "" if form == "folder" else f".{form}"
    for name, shades in (("photos", (1, 2, 8)), ("others", (3, 9))):
        files = {f"{'cats/' if i == 2 else ''}{i}.jpg": encoded(shade=i) for i in shades}
        (tmp_path / "data").mkdir(exist_ok=True)
        make(
            tmp_path / "data" / f"{name}{ending}", files | ({"9.jpg": b"damaged"} if name == "photos" else {})
        )
    rows = [
        {"image": "1.jpg"}, {"image": "/data/photos/cats/2.jpg"}, {"image": "photos/1.jpg"}, {"image": "3.jpg"},
        {"image": "cats/7.jpg"}, {"image": "photos/9.jpg"},
    ]  # fmt: skip
    (tmp_path / "captions.json").write_text(json.dumps(rows))
    sources = tuple(f"{tmp_path}/data/{name}{ending}" for name in ("photos", "others"))
    root = tmp_path / "root"
    options = {"ids": str(tmp_path / "captions.json"), "out": str(root), "images_only": True}
    capsys.readouterr()
    assert kit.called("fetch", *sources, **options, json_output=True) == 3
    summary = json.loads(capsys.readouterr().out)
    assert (summary["wanted"], summary["stored_before"], summary["stored"]) == (5, 0, 3)
    assert sorted(summary["missing"]) == ["cats/7.jpg", "photos/9.jpg"]  # the latter is damaged
    expected = {hashed(f"{name}.jpg") for name in ("photos/1", "photos/cats/2", "others/3")}
    assert {*sa1b.open(root).table.image_id.tolist()} == expected
    assert not verify(root, deep=True).findings
    (tmp_path / "captions.json").write_text(json.dumps([*rows[:4], {"image": "8.jpg"}]))
    assert kit.called("fetch", *sources, **options) == 0
    assert "stored   4 (1 now, 3 before)" in capsys.readouterr().out
    assert {*sa1b.open(root).table.image_id.tolist()} == expected | {hashed("photos/8.jpg")}


@pytest.mark.filterwarnings("ignore:.* has no caption for 2 of 5 images")
def test_a_table_by_own_file_names_is_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the path in the source, with or without folders above it that name the source."""
    root = tmp_path / "shards"
    for name, shades in (("photos", (1, 2)), ("others", (3,))):
        files = {f"{'cats/' if i == 2 else ''}{i}.jpg": encoded(shade=i) for i in (*shades, 9)}
        reshard(written(tmp_path / name, files), root)
    rows = [
        {"image": "1.jpg", "caption": "one"},
        {"image": "/data/photos/cats/2.jpg", "caption": "two"},
        {"image": "others/3.jpg", "caption": "three"},
        {"image": "9.jpg", "caption": "of both sources"},
        {"image": "cats/7.jpg", "caption": "of none"},
    ]
    (tmp_path / "captions.json").write_text(json.dumps(rows))
    ids = {hashed(f"{name}.jpg"): name for name in ("photos/1", "photos/cats/2", "others/3")}
    wanted = {"photos/1": "one", "photos/cats/2": "two", "others/3": "three"}
    with pytest.warns(UserWarning, match="2 of 5 rows of column 'image' name no image") as record:
        stream = sa1b.Stream(
            root, global_batch=1, masks=0, image_size=32, join={"caption": str(tmp_path / "captions.json")}
        )
    assert any("no caption for 2 of 5 images" in str(one.message) for one in record)
    found = {int(batch.ids[0]): batch.extra["caption"][0] for batch in stream}
    assert {ids[one]: text for one, text in found.items() if text is not None} == wanted
    out = tmp_path / "parquet"
    words = f"caption={tmp_path / 'captions.json'}"
    assert kit.called("export", root, to="parquet", out=out, join=(words,), json_output=True) == 0
    table = pq.read_table(out)
    exported = dict(zip(table["image_id"].to_pylist(), table["caption"].to_pylist(), strict=True))
    assert exported == {one: found[one] for one in exported}
    capsys.readouterr()
    assert view_main(str(root), ids=str(tmp_path / "captions.json"), name="captioned", json_output=True) == 0
    printed = capsys.readouterr()
    assert "2 of 5 rows name no image (9.jpg, cats/7.jpg); they are left out" in printed.err
    assert json.loads(printed.out)["images"] == len(ids)
    table = sa1b.open(root).table

    def open_view(root: Path, table: Any, name: str) -> Any:
        return sa1b.Stream(root, global_batch=1, masks=0, view=name).view

    assert open_view(root, table, "captioned").image_ids(table).tolist() == sorted(ids)
    (tmp_path / "names.txt").write_text("1.jpg\n\n" + f"{hashed('others/3.jpg')}\n")
    assert view_main(str(root), ids=str(tmp_path / "names.txt"), name="two", json_output=True) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 2
    for text in (
        ["1.jpg", "data\\others\\3.jpg"],
        {"1.jpg": "one", "photos/cats/2.jpg": ["two", "zwei"]},
        [hashed("photos/1.jpg"), "3.jpg"],
    ):
        (tmp_path / "list.json").write_text(json.dumps(text))
        assert (
            kit.called(
                "view",
                str(root),
                ids=str(tmp_path / "list.json"),
                name="listed",
                overwrite=True,
                json_output=True,
            )
            == 0
        )
        assert json.loads(capsys.readouterr().out)["images"] == 2
    (tmp_path / "list.json").write_text(json.dumps({row["image"]: row["caption"] for row in rows}))
    with pytest.warns(UserWarning, match="2 of 5 rows of column 'image_id' name no image"):
        stream = sa1b.Stream(
            root, global_batch=1, masks=0, image_size=32, join={"caption": str(tmp_path / "list.json")}
        )
    assert {int(batch.ids[0]): batch.extra["caption"][0] for batch in stream} == found
    (tmp_path / "names.txt").write_text("cats/7.jpg\n../1.jpg\n")
    with pytest.raises(UsageError, match=r"line 1: 'cats/7.jpg' is not an image id; .* file in its source"):
        view_main(str(root), ids=str(tmp_path / "names.txt"), name="none")
    (tmp_path / "captions.csv").write_text("image,text\nphotos/1.jpg,first\nphotos/1.jpg,second\n")
    with pytest.warns(UserWarning, match="no text for 4 of 5"):
        stream = sa1b.Stream(
            root, global_batch=5, masks=0, image_size=32, text=str(tmp_path / "captions.csv")
        )
    (batch,) = stream
    assert {*filter(None, batch.extra["text"])} <= {"first", "second"}
