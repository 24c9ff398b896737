"""`sa1b query`: SQL over the indexes of a dataset directory."""

import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

import sa1b
from benchmarks import process_tree
from sa1b.errors import Sa1bError, ShardError, UsageError
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.query import sql
from sa1b.programs.query.verb_query import main
from sa1b.shards.documents import Options
from sa1b.storage import atomic
from sa1b.views.predicate import IMAGE_FIELDS, MASK_FIELDS, mask_predicate, mask_values
from tests.shards import tiny
from tests.storage.service import Service

Query = Callable[..., str]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A path that DuckDB would take as a pattern.
    folder = tmp_path_factory.mktemp("queried [1]*") / "data"
    folder.mkdir()
    for name, first in (("sa_000020", 223750), ("sa_000021", 234937)):
        tiny.make_tar(folder / f"{name}.tar", range(first, first + 20, 2))
        tiny.ingest_tar(folder / f"{name}.tar", folder / "root", images_per_shard=4)
    return folder / "root"


@pytest.fixture
def query(root: Path, capsys: pytest.CaptureFixture[str]) -> Query:
    def run(sql: str, at: object = root, **flags: object) -> str:
        main(str(at), sql, **flags)
        return capsys.readouterr().out

    return run


def test_every_number_of_every_mask_and_image_is_that_of_the_annotations(
    root: Path, query: Query, tmp_path: Path
) -> None:
    query("SELECT * FROM masks ORDER BY image_id, mask_id", parquet=tmp_path / "masks.parquet")
    found = pq.read_table(tmp_path / "masks.parquet")
    assert set(found.column_names) == {"image_id", *MASK_FIELDS}
    assert [path.name for path in tmp_path.iterdir()] == ["masks.parquet"]
    samples = sorted(sa1b.open(root), key=lambda sample: sample.image_id)
    start = 0
    for sample in samples:
        one = sample.annotations
        order = np.argsort(one.mask_id)
        rows = found.slice(start, len(one))
        start += len(one)
        assert set(rows["image_id"].to_pylist()) == {sample.image_id}

        def column(name: str, one: object = one) -> np.ndarray:
            return (
                np.full(len(one), getattr(one, name)) if name in ("width", "height") else getattr(one, name)
            )

        for name, values in mask_values(set(MASK_FIELDS), column).items():
            np.testing.assert_array_equal(rows[name].to_numpy(), values[order], err_msg=name)
    assert start == len(found)
    images = list(csv.DictReader(io.StringIO(query("FROM images ORDER BY image_id", csv_output=True))))
    assert set(IMAGE_FIELDS) < set(images[0])
    for row, sample in zip(images, samples, strict=True):
        assert (row["masks"], row["jpg_bytes"]) == (str(len(sample.annotations)), str(len(sample.jpeg)))
        assert (row["shard"], row["jpg_offset"]) == (sample.shard, str(sample.offset))
        assert row["source"] == ("sa_000020" if sample.image_id < 230000 else "sa_000021")


def test_a_condition_of_a_view_has_the_same_meaning_after_where(query: Query, tmp_path: Path) -> None:
    texts = {image_id: tiny.document(image_id, masks=6) for image_id in (3, 4)}
    for number, mask in enumerate(texts[4]["annotations"]):
        mask.update({} if number % 2 else {"stability_score": None, "bbox": "lost"})
    members = [(f"sa_{i}.jpg", tiny.pair(i)[0]) for i in texts]
    members += [(f"sa_{i}.json", tiny.encode(text)) for i, text in texts.items()]
    reshard(
        [tiny.write_tar(tmp_path / "sa_000001.tar", members)],
        tmp_path / "root",
        Options(),
        Policy(),
        IngestRun(quiet=True),
    )
    samples = [sample.annotations for sample in sa1b.open(tmp_path / "root")]
    assert [int(np.isnan(found.stability_score).sum()) for found in samples] == [0, 3]
    for condition in (
        "stability_score >= 0.5", "not stability_score >= 0.5", "stability_score != 2", "bbox_x >= 0",
        "stability_score > 2 or area > 0", "not (stability_score > 2 and area < 0)", "area / 0 > 1",
        "not bbox_width / (area - area) = 0", "predicted_iou > 0 and not bbox_y < -1",
    ):  # fmt: skip
        expected = [int(mask_predicate(condition).masks(found).sum()) for found in samples]
        counts = query(
            f"SELECT count(*) FILTER (WHERE {condition}) AS n FROM masks GROUP BY image_id ORDER BY image_id",
            at=tmp_path / "root",
            csv_output=True,
        )
        assert list(map(int, counts.split()[1:])) == expected, condition


def test_the_forms_of_a_result(query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = query("SELECT image_id, source FROM images ORDER BY 1; -- first", limit=2).splitlines()
    assert shown[:3] == ["image_id  source", "  223750  sa_000020", "  223752  sa_000020"]
    assert "the first 2 rows" in shown[3]
    assert query("SELECT image_id FROM images WHERE false") == "image_id\n0 rows\n"
    assert query("SELECT chr(27) || '[31m' AS a") == "a\n\\x1b[31m\n1 row\n"
    stored = query("SELECT chr(27) AS a", csv_output=True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert (stored, query("SELECT chr(27) AS a", csv_output=True)) == ("a\n\x1b\n", "a\n\\x1b\n")
    monkeypatch.undo()
    assert query("SELECT 1 AS a, 'x,\"y' AS b, NULL AS c", csv_output=True) == 'a,b,c\n1,"x,""y",\n'
    sql = "SELECT 'nan'::DOUBLE AS a, [1.5, NULL] AS b, sum(masks) AS c FROM images"
    assert json.loads(query(sql, json_output=True)) == [{"a": None, "b": [1.5, None], "c": 60}]
    assert json.loads(query("SELECT 1 WHERE false", json_output=True)) == []
    captions = tmp_path / "captions.csv"
    captions.write_text("image_id,caption\n223752,a dog\n")
    joined = query(f"SELECT caption, masks FROM images JOIN '{captions}' USING (image_id)", json_output=True)
    assert json.loads(joined) == [{"caption": "a dog", "masks": 3}]


def test_times_of_a_time_zone_are_text(query: Query) -> None:
    sql = """SELECT i, TIMESTAMPTZ '2026-01-02 03:04:05+00' + to_hours(i) AS "a ""t", [now()] AS several
             FROM range(3) AS t(i) ORDER BY i DESC"""
    rows = json.loads(query(sql, json_output=True))
    assert [row["i"] for row in rows] == [2, 1, 0]
    assert all(row['a "t'].startswith("2026-01-0") for row in rows)
    assert rows[0]["several"].startswith("[")
    assert "2026-01-0" in query(sql)


def test_a_result_is_a_view_that_streams(root: Path, query: Query, tmp_path: Path) -> None:
    sql = "SELECT image_id FROM images WHERE source = 'sa_000021' ORDER BY image_id DESC LIMIT 3"
    out = tmp_path / "views/some.json"
    flags = {"as_view": "some", "out": out, "masks_where": "area >= 1"}
    document = json.loads(query(sql, json_output=True, **flags))
    assert (document["images"], document["of_images"]) == (3, 20)
    view = sa1b.Stream(root, view=out, global_batch=1, image_size=64).view
    assert view.image_ids(sa1b.open(root).table).tolist() == [234951, 234953, 234955]
    assert view.masks_where is not None
    # The document has the command that selects the view again, and the same query may write it again.
    query(sql, **flags)
    with pytest.raises(UsageError, match=r"selected with .*ORDER BY image_id DESC.*--overwrite"):
        query("SELECT image_id FROM images", **flags)


@pytest.mark.parametrize(
    ("sql", "flags", "message"),
    [
        ("SELECT nope FROM masks", {}, r'^SQL: Binder Error: Referenced column "nope" not found.*"$'),
        ("SELEC 1", {}, "^SQL: Parser Error"),
        ("", {}, "^SQL .no statement"),
        ("SELECT 1; SELECT 2", {}, "one SELECT statement"),
        ("COPY (SELECT 1) TO 'x.csv'", {}, "^SQL .COPY.: must be one SELECT"),
        ("CREATE TABLE t AS SELECT 1", {}, "^SQL .CREATE.: must be one SELECT"),
        ("EXPLAIN ANALYZE SELECT 1", {}, "^SQL .EXPLAIN.: must be one SELECT"),
        ("SELECT 'a'::INTEGER FROM masks", {}, "^SQL: Conversion Error"),
        ("SELECT count(*) FROM 'x.parquet'", {}, "No files found"),
        ("SELECT 1", {"csv_output": True, "as_view": "x"}, "--csv and --as-view: exclude each other; choose one form"),
        ("SELECT 1", {"masks_where": "area > 1"}, "only with --as-view"),
        ("SELECT 1", {"memory": "much"}, "--memory much: .*write a size such as 2GB"),
        ("SELECT avg(area_fraction) FROM masks", {"memory": "1KB"}, "--memory: too small .*Out of Memory Error.*raise it"),
        ("SELECT mask_id FROM masks", {"as_view": "x"}, "no column image_id; its columns: mask_id"),
        ("SELECT image_id, mask_id FROM masks", {"as_view": "x"}, "pass the condition to --masks-where"),
        ("SELECT image_id::VARCHAR AS image_id FROM images", {"as_view": "x"}, "has type"),
        ("SELECT NULL::BIGINT AS image_id", {"as_view": "x"}, "contains NULL"),
        ("SELECT 7 AS image_id", {"as_view": "x"}, "--as-view: 7: not in"),
        ("SELECT -3 AS image_id", {"as_view": "x"}, "--as-view: column image_id contains -3; omit"),
        ("SELECT [1] AS image_id", {"as_view": "x"}, r"has type INTEGER\[\]; select the ids"),
        ("SELECT INTERVAL 1 DAY AS image_id", {"as_view": "x"}, "has type INTERVAL; select the ids"),
        ("SELECT 1 FROM 'https://127.0.0.1:1/x.parquet'", {}, "^SQL .file at a URL.: cannot be joined; copy"),
        ("SELECT image_id FROM images WHERE false", {"as_view": "x"}, "no rows"),
        ("SELECT image_id FROM images", {"as_view": "x y"}, "^--as-view 'x y'"),
        ("SELECT 1", {"parquet": Path("/nowhere/x.parquet")}, "--parquet /nowhere/x.parquet: its folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(
    sql: str, flags: dict[str, object], message: str, query: Query, root: Path
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        query(sql, **flags)
    assert "\n" not in str(raised.value)
    assert not (root / "views").exists()


def test_a_parquet_file_that_cannot_be_written_is_named(
    query: Query, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=r"No such file or directory: '/proc/x.parquet'$"):
        query("SELECT 1", parquet=Path("/proc/x.parquet"))

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "flush", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'x.parquet'}'"):
        query("SELECT 1", parquet=tmp_path / "x.parquet")
    assert not list(tmp_path.iterdir())


def test_a_url_is_read_by_ranges_and_damage_names_the_index(root: Path, query: Query, tmp_path: Path) -> None:
    url = "http://127.0.0.1:{}/data/root"
    with Service("range_server", root.parents[1]) as service:
        sql = (
            "SELECT source, sum(area) AS area FROM masks JOIN images USING (image_id) GROUP BY ALL ORDER BY 1"
        )
        assert query(sql, at=url.format(service.port)) == query(sql)
        name = "sa1b-000020-0001.parquet"
        data = (root / name).read_bytes()
        try:
            (root / name).write_bytes(b"PAR1" + bytes(len(data) - 8) + b"PAR1")
            for at in (root, url.format(service.port)):
                with pytest.raises(ShardError, match=f"{name}: .*index .*` rebuilds"):
                    query("SELECT sum(area) FROM masks", at=at)
            (root / name).unlink()
            with pytest.raises(Sa1bError, match=name):
                query("SELECT sum(area) FROM masks", at=url.format(service.port))
        finally:
            (root / name).write_bytes(data)


def test_ctrl_c_before_the_query_ends_the_command(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    def views(*_: object) -> Iterator[str]:
        yield "CREATE VIEW images AS SELECT 1 AS image_id"
        raise RuntimeError("Query interrupted")  # what DuckDB raises in the main thread

    monkeypatch.setattr(sql, "_views", views)
    with pytest.raises(KeyboardInterrupt):
        query("SELECT 1")


def test_a_query_in_a_thread_ends_with_its_connection(root: Path) -> None:
    def work() -> None:
        with suppress(duckdb.Error):
            query.connection.execute(query.text)

    endless = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"
    with sql.open_query(root, endless) as query:
        thread = Thread(target=work)
        thread.start()
        clock = time.pthread_getcpuclockid(thread.ident)
        while time.clock_gettime(clock) < 0.1:  # the query computes
            assert thread.is_alive()
            time.sleep(0.01)
    thread.join()


def test_ctrl_c_ends_a_query_and_leaves_no_file(root: Path, tmp_path: Path) -> None:
    sql = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE (a.range * b.range) % 7 = 3"
    command = [
        sys.executable,
        "-m",
        "sa1b",
        "query",
        str(root),
        sql,
        "--parquet",
        str(tmp_path / "x.parquet"),
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while not list(tmp_path.glob("sa1b-query-*")):
            assert process.poll() is None
        begun = process_tree.processor_seconds(process.pid)
        while process_tree.processor_seconds(process.pid) < begun + 0.5:  # the query computes
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert not list(tmp_path.iterdir())
