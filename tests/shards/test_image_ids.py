"""Files of image ids: the same ids from every form, and errors that name the line.

`sa1b locate` gives the ids of a file, whether their images are stored or not; `sa1b view` those that are not.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit import refused, run
from tests.shards import tiny

IDS = [7, 223750, 2**40 + 7, 2**63 - 1]
STORED = [3, 7, 9]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ids")
    tiny.make_tar(folder / "sa_000001.tar", STORED)
    tiny.ingest_tar(folder / "sa_000001.tar", folder / "root")
    return folder / "root"


def ids_of(root: Path, file: object, note: str = "") -> list[int]:
    done = run("locate", root, "--ids", file, "--json", code=None)
    assert done.code in (0, 3), done.err
    assert note in done.err
    return [row["image_id"] for row in done.json["images"]]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "\n".join(map(str, IDS))),
        ("a.txt", "\n".join(f"{i}.jpg" for i in IDS)),
        ("a.txt", f"007\nsa_{IDS[1]}.jpg\n{IDS[2]}.jpg\nsa_{IDS[3]}\n"),
        ("a.txt", "\n\n".join(f"  sa_{i} " for i in IDS) + "\n"),
        ("a.txt", "\r\n".join(f"sa_{i}.jpg" for i in reversed(IDS + IDS))),
        ("a.txt", "\ufeff" + "\n".join(map(str, IDS))),
        ("no_ending", "image_id\n" + "\n".join(map(str, IDS))),
        ("a.csv", "image_id\n" + "\n".join(map(str, IDS))),
        ("a.csv", '"x,y",file_name\n' + "\n".join(f'"1,2",sa_{i}.jpg' for i in IDS)),
        ("a.txt", "note,id\n" + "\n".join(f"n,{i}" for i in IDS)),
        ("a.tsv", "id\tnote\n" + "\n".join(f"{i}\tn" for i in IDS)),
        ("a.txt", "file_name\timage_id\n" + "\n".join(f"x\t{i}" for i in IDS)),
        ("a.csv", b"image_id,titre\n" + b"".join(b"%d,\xe9t\xe9\n" % i for i in IDS)),  # not UTF-8
        ("a.ids", np.array(IDS, "<u8").tobytes()),
    ],
)
def test_a_file_in_every_form(root: Path, tmp_path: Path, name: str, text: str | bytes) -> None:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    assert ids_of(root, tmp_path / name) == IDS


@pytest.mark.parametrize(
    "column",
    [pa.array(IDS, pa.int64()), pa.array(IDS, pa.uint64()), pa.array([f"sa_{i}.jpg" for i in IDS]), pa.array([str(i) for i in IDS], pa.large_string())],
)  # fmt: skip
def test_a_parquet_column(root: Path, tmp_path: Path, column: pa.Array) -> None:
    path = tmp_path / "whatever"
    pq.write_table(pa.table({"other": range(4), "image_id": column}), path)
    assert ids_of(root, path) == IDS
    pq.write_table(pa.table({"mine": column, "id": [1, 2, 3, 4]}), path)
    assert ids_of(root, f"{path}:mine") == IDS
    assert ids_of(root, path) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["list.json", "lines.jsonl", "table.csv"])
def test_lists_that_also_name_images_of_other_datasets(root: Path, tmp_path: Path, name: str) -> None:
    names = [f"sam\\images\\sa_{IDS[1]}.jpg", "coco/train2017/000000000009.jpg", f"sa_{IDS[0]}.jpg"]
    rows = [json.dumps({"id": "000000000009", "image": one, "conversations": []}) for one in names]
    forms = {"list.json": f"[{','.join(rows)}]", "lines.jsonl": "\n".join(rows)}
    path = tmp_path / name
    path.write_text(forms.get(name, "\n".join(["id,image", *(f"9,{one}" for one in names)])))
    for note in ("1 of 3 rows", "coco/train2017/000000000009.jpg"):
        assert ids_of(root, path, note=note) == sorted(IDS[:2])
    path.write_text("{" if "json" in name else "id,image\n9")
    refused("locate", root, "--ids", path, names=name)


def test_names_of_others_are_printed_without_secrets_and_control_characters(
    root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    path.write_text("image\nsa_7.jpg\ns3://user:PASS@bucket/\x1b[31m.jpg\n")
    assert ids_of(root, path, note=r"(s3://bucket/\x1b[31m.jpg)") == [7]


def test_a_column_by_its_name(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,chosen\n1,7\n2,sa_9\n")
    assert ids_of(root, f"{path}:chosen") == [7, 9]
    for file, names in ((f"{path}:nothing", "id, chosen"), (f"{tmp_path}/nothing:id", "nothing:id")):
        refused("locate", root, "--ids", file, names=names)
    path.write_text("one,two\n1,7\n")
    refused("locate", root, "--ids", path, names="one, two")


NO_LISTS = [
    ("a.txt", b"105\n\nx\n", "a.txt, line 3: 'x'"),
    ("a.txt", b"-3\n", "line 1: '-3'"),
    ("a.txt", b"1\n2\n%d\n" % 2**63, "line 3: '9223372036854775808'"),
    ("a.txt", b"%d\n" % 2**64, "line 1"),
    ("a.txt", b"1" * 9000, "line 1"),
    ("a.txt", b"5\n1.5\n", "line 2"),
    ("a.txt", b"sa_5.json\n", "line 1"),
    ("a.txt", b"7\n0x10\n", "line 2"),
    ("a.txt", b"+7\n", "line 1"),
    ("a.txt", b"sa_7.jpg\nsa_.jpg\n", "line 2"),
    ("a.txt", "٣\n".encode(), "line 1"),
    ("a.csv", b"id,x\n5,1\nsix,1\n", "a.csv, line 3: 'six'"),
    ("a.txt", b"\n", "a.txt: "),
    ("a.txt", b"", "a.txt: "),
    ("a.csv", b"id\n", "a.csv: "),
    ("a.csv", b"", "a.csv: "),
    ("a.csv", b"id," + b"x" * 200_000 + b"\n5,1\n", "a.csv: "),
    ("a.csv", b"id,x\n\xe9,1\n", "a.csv: "),
    ("a.txt", b"\xff\xfe\x00", "a.txt: "),
    ("a.txt", b"7\n\xff\n", "a.txt: "),
    ("a.csv", b"id,x\n5\n", "a.csv: "),
    ("a.ids", b"1234567", "a.ids: "),
    ("a.ids", np.array([5, 2**63], "<u8").tobytes(), "a.ids: "),
    ("a.bin", b"PAR1 and no more", "a.bin: "),
    ("a.parquet", pa.array([1, -1]), "row 2: -1"),
    ("a.parquet", pa.array([1, None]), "row 2: None"),
    ("a.parquet", pa.array([1, 2**63], pa.uint64()), f"row 2: {2**63}"),
    ("a.parquet", pa.array(["1", None]), "row 2"),
    ("a.parquet", pa.array(["1", ""]), "row 2"),
    ("a.parquet", pa.array([1.0, 2.0]), "double"),
]


@pytest.mark.parametrize(("name", "content", "names"), NO_LISTS)
def test_what_is_no_list_of_ids_is_refused(
    root: Path, tmp_path: Path, name: str, content: bytes | pa.Array, names: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(pa.table({"id": content}), path)
    done = refused("locate", root, "--ids", path, names=names)
    assert str(path) in done.err
    assert done.err.count("\n") == 1


def test_missing_ids_are_listed_and_each_other_id_is_taken_once(root: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("10\n9\n4\n3\n1\n9\n4\n")
    flags = ("--missing", "list", "--name", "some", "--json")
    assert run("view", root, "--ids", tmp_path / "ids.txt", *flags, code=3).json["missing_ids"] == [1, 4, 10]
    (view,) = (root / "views").glob("*.ids")
    assert np.fromfile(view, "<u8").tolist() == [3, 9]
