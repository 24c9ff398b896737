"""Shards in SAM 3's training: the queries and masks that its own loader reads from a file in COCO's format.

What its class `COCO_FROM_JSON` does is stated here. With its sources, that class is compared, and its dataset
reads images and queries:

    SA1B_SAM3=/path/to/sam3:/path/to/packages pytest tests/integrations/test_sam3.py
"""

import importlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pycocotools import mask as coco

import sa1b
from sa1b.integrations.sam3 import PhraseLoader
from tests import kit
from tests.integrations import project
from tests.shards.tiny_source import picture

SOURCES = "SA1B_SAM3"
PATH = "sa1b-shard://"
CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}, {"id": 9, "name": "red ball"}]
Exported = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("modules")


class Contract:
    """`COCO_FROM_JSON`: a datapoint for each image and chunk of categories, a query for each category."""

    def __init__(
        self, file: Path, include_negatives: bool = True, category_chunk_size: int | None = None
    ) -> None:
        self.document, self.negatives = json.loads(file.read_text()), include_negatives
        self.names = {one["id"]: one["name"] for one in self.document["categories"]}
        self.images = sorted(self.document["images"], key=lambda one: one["id"])
        ids, size = sorted(self.names), category_chunk_size or len(self.names)
        self.chunks = [ids[first : first + size] for first in range(0, len(ids), size)]

    def getDatapointIds(self) -> list[int]:
        return list(range(len(self.images) * len(self.chunks)))

    def loadQueriesAndAnnotationsFromDatapoint(self, idx: int) -> tuple[list[Any], list[Any]]:
        image, queries, annotations = self.images[idx // len(self.chunks)], list[Any](), list[Any]()
        sizes = torch.tensor([image["width"], image["height"]] * 2)
        for category in self.chunks[idx % len(self.chunks)]:
            of_query = []
            for one in self.document["annotations"]:
                if (one["image_id"], one["category_id"]) == (image["id"], category):
                    box = (torch.tensor(one["bbox"], dtype=torch.float32) / sizes).clamp(0, 1)
                    of_query.append(len(annotations))
                    annotations.append({
                        "image_id": 0, "bbox": box, "area": (box[2] * box[3]).item(), "id": len(annotations),
                        "segmentation": one["segmentation"], "object_id": len(annotations), "is_crowd": one["iscrowd"],
                    })  # fmt: skip
            if of_query or self.negatives:
                queries.append({
                    "id": len(queries), "original_cat_id": category, "object_ids_output": of_query,
                    "query_text": self.names[category], "query_processing_order": 0, "ptr_x_query_id": None,
                    "ptr_y_query_id": None, "image_id": 0, "input_box": None, "input_box_label": None,
                    "input_points": None, "is_exhaustive": True,
                })  # fmt: skip
        return queries, annotations


def loader_of(file: Path, **options: Any) -> list[Any]:
    """The contract and, if there are sources, SAM 3's own loader."""
    made: list[Any] = [Contract(file, **options)]
    if project.folders(SOURCES):
        made.append(modules()[0].COCO_FROM_JSON(str(file), **options))
    return made


def modules() -> tuple[Any, Any]:
    with project.imported(SOURCES, sam3="sam3"):
        names = ("coco_json_loaders", "sam3_image_dataset")
        loaders, dataset = (importlib.import_module(f"sam3.train.data.{name}") for name in names)
    return loaders, dataset


@pytest.fixture(scope="module")
def categorised(tmp_path_factory: pytest.TempPathFactory, root: Path, exported: Exported) -> Path:
    """A dataset directory made from a file with categories: the images of `root`."""
    folder = tmp_path_factory.mktemp("categorised")
    files = exported("coco")
    document = json.loads((files / "annotations.json").read_text())
    for number, one in enumerate(document["annotations"]):
        one["category_id"] = CATEGORIES[number * 7 % 5 // 2]["id"]
    (folder / "own.json").write_text(json.dumps(document | {"categories": CATEGORIES}))
    kit.run("reshard", folder / "own.json", "--out", folder / "root", "--images", files / "images")
    kit.run("export", folder / "root", "--to", "coco", "--out", folder / "coco")
    return folder


@pytest.mark.parametrize("options", [{}, {"category_chunk_size": 2}, {"include_negatives": False}])
def test_categories_are_those_of_the_exported_file(categorised: Path, options: dict[str, Any]) -> None:
    ours = pickle.loads(pickle.dumps(PhraseLoader(str(categorised / "root"), categories=True, **options)))
    for theirs in loader_of(categorised / "coco" / "annotations.json", **options):
        assert list(ours.getDatapointIds()) == theirs.getDatapointIds()
        masks = 0
        for idx in ours.getDatapointIds():
            expected, found = (one.loadQueriesAndAnnotationsFromDatapoint(idx) for one in (theirs, ours))
            assert expected[0] == found[0]
            for mask, other in zip(expected[1], found[1], strict=True):
                project.assert_same(mask, other)
            masks += len(found[1])
        assert masks > 50


def pixels(mask: dict[str, Any]) -> bytes:
    return bytes(coco.decode(mask["segmentation"]))


def test_phrases_of_a_table_are_queries_of_their_image(root: Path, tmp_path: Path) -> None:
    masks = [
        (sample, one) for sample in sa1b.open(root) for one in sample.annotations.to_json()["annotations"]
    ]
    ids = [mask_id for sample in sa1b.open(root) for mask_id in sample.annotations.mask_id.tolist()]
    texts = [None if number % 6 == 5 else f"phrase {number % 7}" for number in range(len(ids))]
    pq.write_table(pa.table({"mask_id": ids, "text": texts}), tmp_path / "phrases.parquet")
    expected: dict[int, dict[str, list[Any]]] = {}
    for (sample, mask), text in zip(masks, texts, strict=True):
        if text is not None and mask["area"]:
            expected.setdefault(sample.image_id, {}).setdefault(text, []).append(pixels(mask))
    loader = PhraseLoader(str(root), phrases=str(tmp_path / "phrases.parquet"))(PATH)
    for idx in loader.getDatapointIds():
        queries, annotations = loader.loadQueriesAndAnnotationsFromDatapoint(idx)
        found = {
            one["query_text"]: [pixels(annotations[number]) for number in one["object_ids_output"]]
            for one in queries
        }
        assert found == expected.pop(loader.loadImagesFromDatapoint(idx)[0]["coco_img_id"], {})
        assert [one["id"] for one in queries] == list(range(len(queries)))
    assert not expected


def test_phrases_of_sa_co_include_those_without_a_mask(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "sa_7.jpg").write_bytes(picture(rng))
    square = [[10.0, 10.0, 20.0, 10.0, 20.0, 20.0, 10.0, 20.0]]
    document = {
        "images": [
            {"id": number, "file_name": "sa_7.jpg", "text_input": text, "height": 48, "width": 64}
            for number, text in enumerate(["a cat", "a dog", "a red ball"])
        ],
        "annotations": [
            {"id": number, "image_id": entry, "category_id": 1, "iscrowd": 0, "segmentation": square}
            for number, entry in enumerate([2, 0, 2])
        ],
        "categories": [{"id": 1, "name": "object"}],
    }
    (tmp_path / "gold.json").write_text(json.dumps(document))
    kit.run("reshard", tmp_path / "gold.json", "--out", tmp_path / "root", "--images", tmp_path / "images")
    for negatives, expected in (
        (True, {"a cat": 1, "a dog": 0, "a red ball": 2}),
        (False, {"a cat": 1, "a red ball": 2}),
    ):
        loader = PhraseLoader(str(tmp_path / "root"), include_negatives=negatives)
        queries, annotations = loader.loadQueriesAndAnnotationsFromDatapoint(0)
        assert {one["query_text"]: len(one["object_ids_output"]) for one in queries} == expected
        assert len(annotations) == 3
        assert annotations[0]["bbox"].tolist() == pytest.approx([10 / 64, 10 / 48, 10 / 64, 10 / 48])


def test_what_has_no_phrases_is_refused_with_the_way_out(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no phrases; pass phrases=, a table by mask_id"):
        PhraseLoader(str(root)).loadQueriesAndAnnotationsFromDatapoint(0)
    with pytest.raises(ValueError, match="has none; they come from a file in COCO's format"):
        PhraseLoader(str(root), categories=True)
    pq.write_table(pa.table({"mask_id": [1], "texts": [["a", "b"]]}), tmp_path / "lists.parquet")
    with pytest.raises(ValueError, match="holds .*list<.*; name a column of strings"):
        PhraseLoader(str(root), phrases=str(tmp_path / "lists.parquet"), column="texts")


def dataset_of(loader: Any, images: str, file: str) -> Any:
    return modules()[1].Sam3ImageDataset(
        images, file, [], max_ann_per_img=500, multiplier=1, training=True, load_segmentation=True,
        max_train_queries=500, coco_json_loader=loader,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not project.folders(SOURCES), reason=f"{SOURCES} does not name the sources")
def test_the_projects_dataset_reads_the_same_images_and_objects(categorised: Path) -> None:
    files = categorised / "coco"
    theirs = dataset_of(modules()[0].COCO_FROM_JSON, str(files / "images"), str(files / "annotations.json"))
    ours = dataset_of(PhraseLoader(str(categorised / "root"), categories=True), "", PATH)
    assert len(ours) == len(theirs) == 19
    for index in range(len(theirs)):
        expected, found = theirs[index], ours[index]
        assert [vars(one) for one in expected.find_queries] == [vars(one) for one in found.find_queries]
        pixels = [np.asarray(one.images[0].data) for one in (expected, found)]
        assert np.array_equal(*pixels)
        for one, other in zip(expected.images[0].objects, found.images[0].objects, strict=True):
            assert torch.equal(one.bbox, other.bbox)
            assert (one.segment, one.area, one.is_crowd) == (other.segment, other.area, other.is_crowd)
