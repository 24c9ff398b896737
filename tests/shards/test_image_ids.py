"""Files of image ids: the same ids from every form, and errors that name the line."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sa1b.errors import UsageError
from sa1b.shards.image_ids import missing_ids, read_image_ids

IDS = [7, 223750, 2**40 + 7, 2**63 - 1]


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
    ],
)
def test_text_in_every_form(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    ids = read_image_ids(path)
    assert ids.tolist() == IDS
    assert ids.dtype == np.uint64


def test_only_the_column_of_ids_has_to_be_utf_8(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"image_id,titre\n7,\xe9t\xe9\n")
    assert read_image_ids(path).tolist() == [7]


@pytest.mark.parametrize(
    "column",
    [pa.array(IDS, pa.int64()), pa.array(IDS, pa.uint64()), pa.array([f"sa_{i}.jpg" for i in IDS]), pa.array([str(i) for i in IDS], pa.large_string())],
)  # fmt: skip
def test_a_parquet_column(tmp_path, column):
    path = tmp_path / "whatever"
    pq.write_table(pa.table({"other": range(4), "image_id": column}), path)
    assert read_image_ids(path).tolist() == IDS
    pq.write_table(pa.table({"mine": column, "id": [1, 2, 3, 4]}), path)
    assert read_image_ids(f"{path}:mine").tolist() == IDS
    assert read_image_ids(path).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["list.json", "lines.jsonl", "table.csv"])
def test_lists_that_also_name_images_of_other_datasets(tmp_path, capsys, name):
    names = [f"sam\\images\\sa_{IDS[1]}.jpg", "coco/train2017/000000000009.jpg", f"sa_{IDS[0]}.jpg"]
    rows = [json.dumps({"id": "000000000009", "image": one, "conversations": []}) for one in names]
    forms = {"list.json": f"[{','.join(rows)}]", "lines.jsonl": "\n".join(rows)}
    path = tmp_path / name
    path.write_text(forms.get(name, "\n".join(["id,image", *(f"9,{one}" for one in names)])))
    assert read_image_ids(path).tolist() == sorted(IDS[:2])
    assert (
        "1 of 3 rows name no image (coco/train2017/000000000009.jpg); they are left out"
        in capsys.readouterr().err
    )
    path.write_text("{" if "json" in name else "id,image\n9")
    with pytest.raises(UsageError, match=name):
        read_image_ids(path)


def test_names_of_others_are_printed_without_secrets_and_control_characters(tmp_path, capsys):
    path = tmp_path / "table.csv"
    path.write_text("image\nsa_7.jpg\ns3://user:PASS@bucket/\x1b[31m.jpg\n")
    assert read_image_ids(path).tolist() == [7]
    assert r"(s3://bucket/\x1b[31m.jpg); they are left out" in capsys.readouterr().err


def test_a_column_by_its_name(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,chosen\n1,7\n2,sa_9\n")
    assert read_image_ids(f"{path}:chosen").tolist() == [7, 9]
    with pytest.raises(
        UsageError, match=r"a.csv: no column 'nothing'; its columns: id, chosen. Name one as .*:COLUMN"
    ):
        read_image_ids(f"{path}:nothing")
    path.write_text("one,two\n1,7\n")
    with pytest.raises(
        UsageError,
        match="no column image_id, file_name, image, img_path, image_path or id; its columns: one, two",
    ):
        read_image_ids(path)
    with pytest.raises(UsageError, match=r"--ids .*: no such file; pass a file of image ids$"):
        read_image_ids(f"{tmp_path}/nothing:id")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            b"105\n\nx\n",
            "a.txt, line 3: 'x' is not an image id; .* such as 223750, or a name such as sa_223750.jpg",
        ),
        ("a.txt", b"-3\n", "line 1: '-3' is not"),
        ("a.txt", b"1\n2\n%d\n" % 2**63, "line 3: '9223372036854775808' .*below 2\\*\\*63"),
        ("a.txt", b"%d\n" % 2**64, "line 1"),
        ("a.txt", b"1" * 9000, "line 1"),
        ("a.txt", b"5\n1.5\n", "line 2"),
        ("a.txt", b"sa_5.json\n", "line 1"),
        ("a.txt", b"7\n0x10\n", "line 2"),
        ("a.txt", b"+7\n", "line 1"),
        ("a.txt", b"sa_7.jpg\nsa_.jpg\n", "line 2"),
        ("a.txt", "٣\n".encode(), "line 1"),
        ("a.csv", b"id,x\n5,1\nsix,1\n", "a.csv, line 3: 'six' is not"),
        ("a.txt", b"\n", "contains no image id"),
        ("a.txt", b"", "contains no image id"),
        ("a.csv", b"id\n", "contains no image id"),
        ("a.csv", b"", "contains no image id"),
        ("a.csv", b"id," + b"x" * 200_000 + b"\n5,1\n", "no line with names of columns"),
        ("a.csv", b"id,x\n\xe9,1\n", "cannot be parsed"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8 text"),
        ("a.txt", b"7\n\xff\n", "cannot be parsed"),
        ("a.csv", b"id,x\n5\n", "a.csv: "),
        ("a.ids", b"1234567", "not the ids of a view"),
        ("a.bin", b"PAR1 and no more", "a.bin: "),
    ],
)
def test_what_is_no_list_of_ids_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as found:
        read_image_ids(path)
    assert str(path) in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, -1]), "row 2: -1 is not an image id"),
        (pa.array([1, None]), "row 2: None is not an image id"),
        (pa.array([1, 2**63], pa.uint64()), f"row 2: {2**63} is not an image id"),
        (pa.array(["1", None]), "row 2"),
        (pa.array(["1", ""]), "row 2"),
        (pa.array([1.0, 2.0]), "is double; image ids are integers or text"),
    ],
)
def test_what_is_no_id_in_a_column_is_refused(tmp_path, column, message):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": column}), path)
    with pytest.raises(UsageError, match=f"{re.escape(str(path))}.*{message}"):
        read_image_ids(path)


def test_the_ids_of_a_view(tmp_path):
    path = tmp_path / "a.ids"
    path.write_bytes(np.array(IDS, "<u8").tobytes())
    assert read_image_ids(path).tolist() == IDS


def test_which_ids_are_missing():
    known = np.array([3, 5, 9], np.uint64)
    assert missing_ids(np.array([1, 3, 4, 9, 10], np.uint64), known).tolist() == [1, 4, 10]
    assert missing_ids(np.array([1], np.uint64), np.empty(0, np.uint64)).tolist() == [1]
