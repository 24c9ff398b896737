"""Columns joined by id are aligned with images or masks, in every format and way of reading."""

import gzip
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

import sa1b
from sa1b.storage.cache import cache_folder
from sa1b.stream import columns
from sa1b.stream.columns import ColumnError, open_columns
from tests import processes
from tests.stream.recorded import FIRST_ID, make_root

IMAGES = 12
IDS = list(range(FIRST_ID, FIRST_ID + IMAGES))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("columns"), IMAGES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stream_of(root: Path, join: Any, **options: Any) -> sa1b.Stream:
    named = {"global_batch": 4, "micro_batch": 2, "image_size": 32, "masks": 4, **options}
    return sa1b.Stream(root, damage_log=root.parent / "log.jsonl", join=join, **named)


def caption(image_id: int) -> str:
    return f"image {image_id}: Grüße, “Straße” {'x' * (image_id % 7)}"


def table_of(ids: list[int], key: str = "image_id", **values: Any) -> pa.Table:
    return pa.table({key: ids, **(values or {"caption": [caption(one) for one in ids]})})


def write(path: Path, table: pa.Table) -> Path:
    """A table in the form that the name says."""
    if path.suffix in (".parquet", ".pq"):
        pq.write_table(table, path, row_group_size=5)
    else:
        text = "".join(json.dumps(row) + "\n" for row in table.to_pylist()).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


SHUFFLED = np.random.default_rng(0).permutation(IDS).tolist()


@pytest.mark.parametrize(
    "name", ["c.parquet", "c.pq", "c.jsonl", "c.ndjson", "c.jsonl.gz", "table", "file://"]
)
def test_captions_are_aligned_with_the_images(root: Path, tmp_path: Path, name: str) -> None:
    table = table_of(SHUFFLED)
    source: Any = table
    if name != "table":
        source = write(tmp_path / ("c.parquet" if name == "file://" else name), table)
        source = f"file://{source}" if name == "file://" else source
    seen = 0
    for batch in islice(stream_of(root, {"caption": source}), 6):
        assert batch.extra["caption"] == [caption(one) for one in batch.ids.tolist()]
        seen += len(batch)
    assert seen == 12


def test_numbers_lists_and_records_are_python_values(root: Path) -> None:
    table = table_of(
        SHUFFLED,
        label=[one % 5 for one in SHUFFLED],
        score=[one / 7 for one in SHUFFLED],
        tags=[["a"] * (one % 3) for one in SHUFFLED],
        embedding=pa.array([[one, one + 1] for one in SHUFFLED], pa.list_(pa.float32(), 2)),
        kind=pa.array([f"k{one % 2}" for one in SHUFFLED]).dictionary_encode(),
        good=[one % 2 == 0 for one in SHUFFLED],
        where={"x": 1} and [{"x": one} for one in SHUFFLED],
    )
    names = ("label", "score", "tags", "embedding", "kind", "good", "where")
    batch = next(iter(stream_of(root, dict.fromkeys(names, table))))
    for position, one in enumerate(batch.ids.tolist()):
        expected = (
            one % 5,
            one / 7,
            ["a"] * (one % 3),
            [one, one + 1],
            f"k{one % 2}",
            one % 2 == 0,
            {"x": one},
        )
        assert tuple(batch.extra[name][position] for name in names) == expected
    assert type(batch.extra["label"][0]) is int


def test_columns_by_mask_id_are_aligned_with_the_masks(root: Path) -> None:
    every = np.concatenate([sample.annotations.mask_id for sample in sa1b.open(root)])
    mixed = np.random.default_rng(1).permutation(every).tolist()
    table = pa.table({"mask_id": mixed, "image_id": [0] * len(mixed), "name": [f"m{one}" for one in mixed]})
    for batch in islice(stream_of(root, {"name": table}), 6):
        assert batch.extra["name"] == [f"m{one}" for one in batch.mask_ids.tolist()]
        assert len(batch.extra["name"]) == len(batch.masks) > 0


def test_missing_rows_are_none_and_counted(root: Path) -> None:
    some = table_of(SHUFFLED[::2])
    with pytest.warns(UserWarning, match="has no caption for 6 of 12 images; their value is None"):
        stream = stream_of(root, {"caption": some})
    missing = 0
    for batch in islice(stream, 6):
        for one, value in zip(batch.ids.tolist(), batch.extra["caption"], strict=True):
            assert value == (caption(one) if one in SHUFFLED[::2] else None)
        missing += batch.extra["caption"].count(None)
    assert missing == 6
    assert stream.columns["caption"].missing >= 6


def test_a_null_is_none_and_counted(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream = stream_of(root, {"caption": table_of(IDS, caption=["a", None] * 6)})
    for batch in islice(stream, 6):
        assert batch.extra["caption"] == [["a", None][one % 2] for one in batch.ids.tolist()]
    assert stream.columns["caption"].missing >= 6


def test_a_mask_without_an_id_has_no_row() -> None:
    column = open_columns({"name": pa.table({"mask_id": [-1, 4], "name": ["x", "y"]})})["name"]
    assert column.lookup(np.array([-1, 4, 5, -1])) == [None, "y", None, None]
    assert column.missing == 3


def test_a_table_without_rows_has_nothing() -> None:
    column = open_columns(
        {"name": pa.table({"image_id": pa.array([], pa.int32()), "name": pa.array([], pa.string())})}
    )
    assert column["name"].lookup(np.array([3, 4])) == [None, None]
    assert column["name"].lookup(np.array([], np.int64)) == []


@pytest.mark.parametrize("kind", ["file", "table"])
@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(one, marks=pytest.mark.slow) for one in ("forkserver", "spawn"))]
)
def test_worker_processes_send_the_columns(root: Path, tmp_path: Path, context: str, kind: str) -> None:
    table = table_of(SHUFFLED)
    source = write(tmp_path / "c.parquet", table) if kind == "file" else table
    stream = stream_of(root, {"caption": source})
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context=context)
    seen = 0
    for batch in islice(loader, 6):
        assert batch.extra["caption"] == [caption(one) for one in batch.ids.tolist()]
        seen += len(batch)
    assert seen == 12


def test_a_loader_and_copies_of_a_batch_keep_them_on_the_host(root: Path) -> None:
    stream = stream_of(root, {"caption": table_of(SHUFFLED)})
    for batch in islice(sa1b.Loader(stream, threads=2, dense=16, quiet=True), 6):
        expected = [caption(one) for one in batch.ids.tolist()]
        packed = batch.pack(lambda size: torch.empty(size + 64, dtype=torch.uint8))
        for copy in (batch, batch.to("cpu"), batch.to("meta"), packed, replace(batch, dense=None)):
            assert copy.extra["caption"] == expected


def test_the_temporary_file_of_a_table_ends_with_its_stream(root: Path) -> None:
    stream = stream_of(root, {"caption": table_of(SHUFFLED)})
    path = stream.columns["caption"].path
    assert path.exists()
    pid = os.fork()
    if pid == 0:  # a worker keeps the file until it ends
        stream.columns.clear()
        os._exit(0 if path.exists() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    del stream
    assert not path.exists()


# --- Conversion


def test_a_source_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = []
    whole = columns.read_table
    monkeypatch.setattr(
        columns, "read_table", lambda *given, **named: converted.append(given[0]) or whole(*given, **named)
    )
    path = write(tmp_path / "c::d.jsonl", table_of([2, 1], caption=["b", "a"]))  # no chain of file systems
    for mode in (0o600, 0o644):
        path.chmod(mode)
        assert open_columns({"caption": path})["caption"].lookup(np.array([1, 2])) == ["a", "b"]
    assert len(converted) == 1
    old = open_columns({"caption": path})["caption"]
    state = path.stat()
    write(path, table_of([2, 1], caption=["c", "a"]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert open_columns({"caption": path})["caption"].lookup(np.array([1, 2])) == ["a", "c"]
    assert len(converted) == 2
    assert old.lookup(np.array([1, 2])) == ["a", "b"]  # an open stream keeps the old column


def test_a_source_behind_a_link_is_converted_again_when_it_changes(root: Path, tmp_path: Path) -> None:
    link, blob = tmp_path / "c.parquet", tmp_path / "blob.parquet"
    link.symlink_to(blob)
    for text in ("a", "b"):  # of one size
        write(blob, table_of(IDS, caption=[text] * len(IDS)))
        assert set(next(iter(stream_of(root, {"caption": link}))).extra["caption"]) == {text}


def test_processes_at_the_same_time_convert_it_once(tmp_path: Path) -> None:
    path = write(tmp_path / "c.parquet", table_of(list(range(5000))))
    program = (
        "import sys, numpy as np; from sa1b.stream.columns import open_columns; "
        f"c = open_columns({{'caption': {str(path)!r}}})['caption']; print(c.path, c.lookup(np.array([4321]))[0])"
    )
    running = [
        processes.Process([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    lines = {process.communicate(timeout=120)[0] for process in running}
    assert len(lines) == 1
    assert caption(4321) in lines.pop()
    assert len(list((cache_folder() / "columns").glob("*/*"))) == 1


def test_an_interrupted_conversion_leaves_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "c.parquet", table_of([1, 2]))
    with monkeypatch.context() as patched:
        patched.setattr(
            columns, "flush", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(OSError, match="No space left on device: .*partial"):
            open_columns({"caption": path})
    assert open_columns({"caption": path})["caption"].lookup(np.array([2])) == [caption(2)]
    assert len(list((cache_folder() / "columns").glob("*/*"))) == 1


def test_a_url_is_read_and_converted_once() -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    with system.open("/tables/c.parquet", "wb") as file:
        pq.write_table(table_of(SHUFFLED), file)
    for _ in range(2):
        column = open_columns({"caption": "memory://tables/c.parquet"})["caption"]
        assert column.lookup(np.array([IDS[3], 1])) == [caption(IDS[3]), None]
    assert len(list((cache_folder() / "columns").glob("*/*"))) == 1
    with system.open("/tables/c.parquet", "wb") as file:
        pq.write_table(table_of([1], caption=["new"]), file)
    assert open_columns({"caption": "memory://tables/c.parquet"})["caption"].lookup(np.array([1])) == ["new"]


# Each names the images in its own way, beside images of other datasets.
PUBLISHED = {
    "lines.jsonl": "\n".join(json.dumps({"image": f"sa_{one}.jpg", "caption": caption(one)}) for one in IDS),
    "list.json": json.dumps(
        [{"img_path": f"sa/sa_{one}.jpg", "caption": caption(one), "n": one} for one in IDS]
    ),
    "coco.json": json.dumps(
        {"images": [{"file_name": f"sa_{one}.jpg", "caption": caption(one)} for one in IDS]}
    ),
    "table.csv": "id,caption\n" + "\n".join(f'sa_{one},"{caption(one)}"' for one in IDS),
    "table.tsv": "image_id\tcaption\n" + "\n".join(f"{one}.jpg\t{caption(one)}" for one in IDS),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_as_people_publish_them_join_by_the_names_of_images(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(PUBLISHED[name])
    opened = open_columns({"caption": str(tmp_path / name)})["caption"]
    assert opened.key == "image_id"
    assert opened.lookup(np.array([*IDS, 10**9])) == [*map(caption, IDS), None]


def test_an_ending_may_be_in_capitals_and_text_of_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "CAPTIONS.CSV"
    text = f"image,caption,title\nsa_{IDS[0]}.jpg,a,\u00e4\n"
    path.write_bytes(text.encode("latin-1"))  # only the chosen column has to be UTF-8
    assert open_columns({"caption": str(path)})["caption"].lookup(np.array(IDS[:1])) == ["a"]
    with pytest.raises(ColumnError, match=r"CAPTIONS\.CSV: .*'title' has another encoding than UTF-8"):
        open_columns({"title": str(path)})


def test_rows_of_other_datasets_are_left_out_and_a_number_in_another_column_is_no_image(
    tmp_path: Path,
) -> None:
    names = [f"sam/images/sa_{IDS[0]}.jpg", f"coco/train2017/{IDS[1]:012d}.jpg", None]
    source = tmp_path / "mixed.json"
    source.write_text(json.dumps([{"id": IDS[1], "image": one, "caption": "a"} for one in names]))
    with pytest.warns(UserWarning, match="2 of 3 rows of column 'image' name no image; they are left out"):
        opened = open_columns({"caption": str(source)})["caption"]
    assert opened.lookup(np.array(IDS[:2])) == ["a", None]


# --- What cannot be joined


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            pa.table({"id": [1], "caption": ["a"]}),
            "has .*caption, and no column to join 'caption' by; name one",
        ),
        (pa.table({"image_id": [1], "text": ["a"]}), "no column 'caption'; choose from image_id"),
        (
            table_of([3, 1, 3, 1, 3]),
            "id 1 occurs more than once in column 'image_id'; repeated rows in all: 3; keep",
        ),
        (
            pa.table({"image_id": ["x"], "caption": ["a"]}),
            "no row of column 'image_id' names an image",
        ),
        (pa.table({"image_id": [1, None], "caption": ["a", "b"]}), "column 'image_id' has no id in 1 rows"),
        (pa.table({"image_id": pa.array([2**63], pa.uint64()), "caption": ["a"]}), "9223372036854775808"),
    ],
    ids=["key", "column", "duplicate", "string", "null", "large"],
)
@pytest.mark.parametrize("form", ["parquet", "jsonl", "table"])
def test_a_table_that_cannot_be_joined_is_named(
    tmp_path: Path, table: pa.Table, message: str, form: str, request: pytest.FixtureRequest
) -> None:
    if form == "jsonl" and "large" in request.node.name:
        message = "cannot be read|double|9223372036854775808"
    source: Any = table if form == "table" else write(tmp_path / f"c.{form}", table)
    if form == "parquet":
        message = message.replace("it has id, caption", "it has").replace("; it has image_id", "")
    with pytest.raises(ColumnError, match=message) as caught:
        open_columns({"caption": source})
    assert ("the pyarrow table" if form == "table" else str(source)) in str(caught.value)


def test_sources_of_another_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ColumnError, match="c.xml is no table; its name must end with one of .parquet"):
        open_columns({"caption": tmp_path / "c.xml"})
    with pytest.raises(ColumnError, match=r"join\['image_id'\]: must be the name of a column"):
        open_columns({"image_id": table_of([1])})
    with pytest.raises(ColumnError, match=r"^join\['caption'\]: \S+missing\.parquet does not exist"):
        open_columns({"caption": tmp_path / "missing.parquet"})
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but nothing else")
    (tmp_path / "broken.jsonl").write_text('{"image_id": 1, "caption": "a"}\n{"image_id": 2, ')
    for name in ("broken.parquet", "broken.jsonl"):
        with pytest.raises(ColumnError, match=f"{name}: cannot be read "):
            open_columns({"caption": tmp_path / name})


def test_a_stream_refuses_a_table_by_its_name(root: Path, tmp_path: Path) -> None:
    write(tmp_path / "c.parquet", table_of([1, 1]))
    with pytest.raises(ColumnError, match=r"c\.parquet: id 1 occurs more than once"):
        stream_of(root, {"caption": tmp_path / "c.parquet"})


def test_a_table_of_none_of_the_images_is_refused(root: Path, tmp_path: Path) -> None:
    write(tmp_path / "c.parquet", table_of([10**9]))
    with pytest.raises(ColumnError, match=r"^join\['caption'\]: .*c\.parquet has none of the \d+ images"):
        stream_of(root, {"caption": tmp_path / "c.parquet"})
