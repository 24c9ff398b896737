"""Views: documents and image lists are checked with the dataset."""

import hashlib
import json

import numpy as np
import pytest

from sa1b import Dataset
from sa1b.errors import ManifestError
from sa1b.ingest.finish import drop_source
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.shards.documents import SEAL, Options, seal_of
from sa1b.views.predicate import mask_predicate
from sa1b.views.view import open_view, write_view
from tests.shards.tiny_source import ROOTS, make_root
from tests.verify.checking import check_here, edit_json, edit_view


@pytest.fixture
def view(root):
    """The document of a view of a few images, with a condition on masks."""
    dataset = Dataset(root)
    rows = np.arange(3, 9, dtype=np.uint32)
    where = mask_predicate("area > 3")
    made = write_view(root, dataset.table, rows, masks_where=where, name="few", chosen_by={"limit": "6"})
    return root / "views" / f"{made.digest}.json"


def found(root):
    return {one.kind for one in check_here(root).findings}


def test_a_view_is_clean(root, view):
    report = check_here(root)
    assert (report.findings, report.notes) == ([], [])


def test_a_document_that_cannot_be_read(root, view):
    for damage in (b"", b"{", b"[]", b'{"format": "other"}'):
        view.write_bytes(damage)
        assert found(root) == {"view_unreadable"}


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(masks_where="area > 4"),
        lambda document: document.update(ids_sha256="0" * 64),
        lambda document: document.update(digest="0" * 64),
        lambda document: document.pop("images"),
    ],
)
def test_a_document_that_its_digest_does_not_guarantee(root, view, change):
    edit_json(view, change)
    (finding,) = check_here(root).findings
    assert (finding.kind, finding.file) == ("view_unreadable", f"views/{view.name}")
    assert "sa1b view" in finding.remedy


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(names=["fed"]),
        lambda document: document.update(chosen_by={"limit": "7"}),
        lambda document: document.update(dataset={"images": 1, "ids_sha256": "0" * 64}),
        lambda document: document.update(further=1),
    ],
)
def test_any_change_of_a_document_is_found_and_refused(root, view, change):
    edit_json(view, change)
    (finding,) = check_here(root).findings
    assert (finding.kind, finding.file) == ("view_unreadable", f"views/{view.name}")
    with pytest.raises(ManifestError, match=f"{view.name}: damaged .*it was changed"):
        open_view(root, Dataset(root).table, view.stem)


def test_a_document_under_another_name(root, view):
    view.rename(view.with_name("0" * 64 + ".json"))
    assert "view_unreadable" in found(root)


def test_row_numbers_of_other_images(root, view):
    """Both digests are right, the images are not those of the ids."""
    rows = np.arange(4, 10, dtype="<u4").tobytes()
    view.with_suffix(".rows").write_bytes(rows)
    edit_view(view, lambda document: document.update(rows_sha256=hashlib.sha256(rows).hexdigest()))
    (finding,) = check_here(root).findings
    assert finding.message == "its row numbers are not those of its images"


def test_a_view_of_a_directory_that_grew_is_clean(sources, tmp_path):
    root = make_root(tmp_path, sources[:1], ROOTS["plain"])
    write_view(root, Dataset(root).table, np.arange(3, dtype=np.uint32))
    reshard(sources, root, Options(images_per_shard=5), Policy(), IngestRun(workers=1, quiet=True))
    assert len(Dataset(root)) == 19
    assert check_here(root).findings == []


def test_images_that_the_dataset_does_not_hold(root, view):
    """A view of another dataset: all digests are right, its images are not here."""
    document = json.loads(view.read_bytes())
    del document[SEAL]
    ids, rows = np.array([1, 2, 3], "<u8").tobytes(), np.arange(3, dtype="<u4").tobytes()
    digest = hashlib.sha256(ids).hexdigest()
    document |= {"digest": digest, "ids_sha256": digest, "masks_where": None, "images": 3}
    document |= {
        "rows_sha256": hashlib.sha256(rows).hexdigest(),
        "dataset": {"images": 3, "ids_sha256": "0" * 64},
    }
    document[SEAL] = seal_of(document)
    view.with_name(f"{digest}.json").write_text(json.dumps(document, indent=1) + "\n")
    view.with_name(f"{digest}.ids").write_bytes(ids)
    view.with_name(f"{digest}.rows").write_bytes(rows)
    report = check_here(root)
    assert report.findings == []
    (note,) = report.notes
    assert f"views/{digest}.json: 3 of its images are not in the dataset, as after --drop; remove the" in note


def test_a_directory_whose_last_source_was_dropped_is_no_dataset(root):
    for name in ("sa_000001", "sa_000002"):
        drop_source(root, name)
    with pytest.raises(ManifestError, match=r"no dataset there; pass the --out folder of `sa1b reshard`$"):
        check_here(root)
