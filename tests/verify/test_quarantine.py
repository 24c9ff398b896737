"""Quarantine against the task files, and the list of warnings."""

import json
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests import kit
from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source
from tests.verify.checking import check

FOLDER = "quarantine/sa_000001"
WARNINGS = "warnings.jsonl"


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """A dataset of a source with two pairs that are refused, one JPEG without partner, and two odd images."""
    folder = tmp_path_factory.mktemp("refusing")
    content = pairs(range(10, 18))
    content[10] = (b"no JPEG", content[10][1])
    content[11] = (content[11][0], b"{")
    for image_id in (12, 13):
        text = json.loads(content[image_id][1])
        text["annotations"][0]["area"] += 1
        content[image_id] = (content[image_id][0], json.dumps(text).encode())
    source = write_source(folder / "sa_000001.tar", content)
    return make_root(folder / "root", [source], ROOTS["plain"])


@pytest.fixture
def root(refusing, tmp_path):
    return shutil.copytree(refusing, tmp_path / "root")


def lines(root, file="refused.jsonl"):
    return [json.loads(line) for line in (root / FOLDER / file).read_text().splitlines()]


def write_lines(root, entries, file="refused.jsonl"):
    (root / FOLDER / file).write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def found(root):
    return {(one.kind, one.file.removeprefix(f"{FOLDER}/")) for one in check(root).findings}


def test_a_quarantine_on_a_web_server_is_read(refusing):
    handler = partial(SimpleHTTPRequestHandler, directory=str(refusing))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert kit.run("verify", f"http://127.0.0.1:{server.server_port}/", "--json", code=0)
        server.shutdown()


def test_a_file_name_that_leaves_the_folder_is_not_opened(root):
    entries = lines(root)
    entries[0]["file"] = "../../dataset.json"
    entries[0]["bytes"] = (root / "dataset.json").stat().st_size
    write_lines(root, entries)
    assert ("quarantine_file_missing", "../../dataset.json") in found(root)


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"reason": 3}', "\xff"])
def test_a_line_that_is_no_entry(root, line):
    with (root / FOLDER / "refused.jsonl").open("ab") as file:
        file.write(line.encode("latin-1") + b"\n")
    assert found(root) == {("quarantine_line", "refused.jsonl")}
    assert "line 5 is not an entry" in check(root).findings[0].message


@pytest.mark.parametrize("change", ["drop", "twice", "reason"])
def test_counts_that_differ_from_the_task_file(root, change):
    entries = lines(root)
    if change == "drop":
        entries = entries[2:]
    elif change == "twice":
        entries += entries[:2]
    else:
        entries = [{**entry, "reason": "bad_rle"} for entry in entries]
    write_lines(root, entries)
    assert ("quarantine_counts", "refused.jsonl") in found(root)


def test_warnings_that_differ_from_the_task_file(root):
    write_lines(root, lines(root, WARNINGS)[:1], WARNINGS)
    (finding,) = check(root).findings
    assert finding.message == "1 images with 'area', 2 in the task file"


def test_a_warning_of_an_image_that_is_not_there(root):
    entries = lines(root, WARNINGS)
    write_lines(root, [{**entries[0], "image_id": 99}, *entries[1:]], WARNINGS)
    (finding,) = check(root).findings
    assert finding.message == "image 99 is not in the dataset"


def test_many_warnings_are_shown_in_part_and_listed_in_json(root):
    entries = [{"reason": "bbox", "image_id": i, "message": f"mask {i}", "masks": [i]} for i in range(50)]
    write_lines(root, entries, WARNINGS)
    text = kit.run("verify", root, "--warnings").out
    assert text.count("image ") == 20
    assert "30 more" in text
    document = kit.run("verify", root, "--warnings", "--json").json
    assert document["counts"] == {"bbox": 50}
    listed = {"source": "sa_000001", "image_id": 49, "message": "mask 49", "masks": [49]}
    assert document["warnings"]["bbox"][49] == listed
