"""Views: documents and image lists are checked with the dataset, and a changed one is not read."""

import hashlib
import json
import re
import shutil

import pytest

import sa1b
from sa1b.errors import ManifestError
from tests.directories import IDS, images, reshard
from tests.kit import files, put, run
from tests.verify.checking import check_here, commands_in


@pytest.fixture
def root(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "root")


def found(root):
    return {one.kind for one in check_here(root).findings}


def view(root):
    """The document of the view `most`."""
    return next(name for name in files(root) if re.fullmatch(r"views/\w+\.json", name))


def stream(root, name, **options):
    return sa1b.Stream(root, view=name, global_batch=1, image_size=64, order="sequential", **options)


def edit(root, change, sealed=False):
    """Write the document as it is written, with `change(document)` applied; or also with the digest of its content."""
    document = json.loads(files(root)[view(root)])
    change(document)
    if sealed:
        seal = document.pop("document_sha256")
        document["document_sha256"] = hashlib.sha256(written(document)).hexdigest()
        assert document["document_sha256"] != seal
    put(root, view(root), written(document))


def written(document):
    return f"{json.dumps(document, indent=1)}\n".encode()


def renamed(root):
    name = view(root)
    put(root, f"views/{'0' * 64}.json", files(root)[name])
    put(root, name, None)


DAMAGES = {
    **{f"the bytes {data!r}": lambda root, data=data: put(root, view(root), data) for data in (b"", b"[]", b'{"format": "other"}')},
    **{
        f"another value of {key}": lambda root, key=key, value=value: edit(root, lambda one: one.update({key: value}))
        for key, value in {
            "masks_where": "area > 4",
            "ids_sha256": "0" * 64,
            "digest": "0" * 64,
            "names": ["fed"],
            "chosen_by": {"limit": "7"},
            "dataset": {"images": 1, "ids_sha256": "0" * 64},
            "further": 1,
        }.items()
    },
    "no number of images": lambda root: edit(root, lambda one: one.pop("images")),
    "another name": renamed,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_document_is_named_and_not_read(whole, root, damage):
    DAMAGES[damage](root)
    (one,) = run("verify", root, "--json", code=1).json["findings"]
    assert one["file"] == view(root)
    assert str(root / view(root)) in one["remedy"]
    with pytest.raises(ManifestError):
        stream(root, "most")
    put(root, view(root), None)  # as the remedy says
    run("view", root, "--ids", whole.parent / "most.txt", "--name", "most")
    assert run("verify", root, "--json").json["findings"] == []
    assert len(stream(root, "most")) == len(IDS) - 1


def test_row_numbers_of_other_images_are_damage_though_their_digest_is_right(root):
    rows = view(root).replace(".json", ".rows")
    data = files(root)[rows]
    put(root, rows, data[4:] + data[:4])
    digest = hashlib.sha256(files(root)[rows]).hexdigest()
    edit(root, lambda document: document.update(rows_sha256=digest), sealed=True)
    assert [one["file"] for one in run("verify", root, "--json", code=1).json["findings"]] == [rows]


def test_a_view_that_a_query_with_layers_selected_is_made_again(root):
    before = files(root).keys()
    sql = "SELECT image_id FROM images WHERE image_id > 100"
    run("query", root, sql, "--layers", "round2", "--as-view", "it-1")
    written = files(root)
    (rows,) = (name for name in written.keys() - before if name.endswith(".rows"))
    put(root, rows, None)
    (one,) = run("verify", root, "--json", code=1).json["findings"]
    with pytest.raises(ManifestError) as refused:
        stream(root, "it-1", layers=["round2"])
    (words,) = commands_in(one["remedy"])
    assert commands_in(str(refused.value)) == [words]
    run(*words)
    assert files(root) == written


def test_a_view_of_a_directory_that_grew_is_clean(tars, tmp_path):
    root, ids = tmp_path / "root", tmp_path / "ids.txt"
    reshard(root, tars[1])
    ids.write_text("300\n302")
    run("view", root, "--ids", ids, "--name", "few")
    reshard(root, *tars)
    assert sorted(images(root)) == IDS
    report = run("verify", root, "--json").json
    assert (report["findings"], report["notes"]) == ([], [])
