"""Shards for SAM 3's training code, in place of its `COCO_FROM_JSON` and the files that it reads."""

import json
from typing import Any

import numpy as np
import torch

from sa1b.arguments import BadValue
from sa1b.integrations import ViewSamples, register
from sa1b.masks import geometry
from sa1b.shards.manifest import READING
from sa1b.shards.sample import Sample
from sa1b.stream.columns import open_columns

_QUERY: dict[str, Any] = {
    "query_processing_order": 0, "image_id": 0, "is_exhaustive": True,
    **dict.fromkeys(("ptr_x_query_id", "ptr_y_query_id", "input_box", "input_box_label", "input_points")),
}  # fmt: skip


class PhraseLoader:
    """SAM 3's `coco_json_loader` of a view: see docs/export.md, "SAM 3"."""

    def __init__(
        self, root: str, *, phrases: str | None = None, column: str = "text", categories: bool = False,
        include_negatives: bool = True, category_chunk_size: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.samples, self.negatives, self.column = ViewSamples(root, **options), include_negatives, None
        if phrases is not None:
            given, stored = {column: phrases}, options.get("storage_options")
            self.column = open_columns(given, stored, key="mask_id", texts=True, argument="phrases")[column]
            if "string" not in str(self.column.kind) or hasattr(self.column.kind, "value_type"):
                raise BadValue(f"column={column!r}: holds {self.column.kind}; name a column of strings")
        sources = self.samples.dataset.manifest.get(READING, {}).values()
        listed = [one for source in sources for one in source.get("categories", ()) if categories]
        if categories and not listed:
            raise BadValue(f"categories=True: {root} has none; they come from a file in COCO's format")
        self.names: dict[int, str] = {one["id"]: one["name"] for one in reversed(listed)}
        ids, size = sorted(self.names), category_chunk_size or max(len(self.names), 1)
        self.chunks = [ids[first : first + size] for first in range(0, len(ids), size)] or [[]]
        register()

    def __call__(self, annotation_file: str) -> "PhraseLoader":
        """The loader itself; SAM 3 calls it with the name of a file, which is not read."""
        return self

    def getDatapointIds(self) -> range:
        """The numbers of all datapoints: those of an image, by position, follow each other."""
        return range(len(self.samples) * len(self.chunks))

    def _located(self, idx: int) -> tuple[Sample, list[int]]:
        position, chunk = divmod(self.getDatapointIds()[idx], len(self.chunks))
        return self.samples.sample(position), self.chunks[chunk]

    def loadImagesFromDatapoint(self, idx: int) -> list[dict[str, Any]]:
        """The entry of the image, whose `file_name` iopath opens in this process."""
        sample, _ = self._located(idx)
        ids = dict.fromkeys(("original_img_id", "coco_img_id"), sample.image_id)
        return [{"id": 0, "file_name": self.samples.path(sample), **ids}]

    def loadQueriesAndAnnotationsFromDatapoint(
        self, idx: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The queries of the image, and the masks of each in turn: bbox, float32 [4], x, y, width and height
        as parts of the image, area, that of the box, and segmentation, COCO's object of run lengths.
        """
        sample, categories = self._located(idx)
        annotations, queries, order = sample.annotations, list[dict[str, Any]](), list[int]()
        for key, chosen in self._groups(sample, categories).items():
            if chosen or self.negatives:
                category, text = (key, self.names[key]) if categories else (1, key)
                objects = list(range(len(order), len(order) + len(chosen)))
                order += chosen
                numbers = {"id": len(queries), "original_cat_id": category, "query_text": text}
                queries.append(_QUERY | numbers | {"object_ids_output": objects})
        runs, origin = annotations.runs(order), annotations.origin()
        crowd = np.zeros(len(annotations), np.int64) if origin is None else origin["iscrowd"]
        boxes = torch.from_numpy(geometry.bbox(runs).astype(np.float32))
        boxes = (boxes / torch.tensor([annotations.width, annotations.height] * 2)).clamp(0, 1)
        values = zip(boxes, runs.to_coco(text=True), crowd[order].tolist(), strict=True)
        return queries, [
            {"image_id": 0, "bbox": box, "area": (box[2] * box[3]).item(), "segmentation": segmentation,
             "object_id": number, "is_crowd": is_crowd, "id": number}
            for number, (box, segmentation, is_crowd) in enumerate(values)
        ]  # fmt: skip

    def _groups(self, sample: Sample, categories: list[int]) -> dict[Any, list[int]]:
        annotations, masks = sample.annotations, self.samples.kept(sample)
        origin, listed, keys = annotations.origin(), list[Any](categories), list[Any]()
        if categories:
            keys = [] if origin is None else origin["category_id"][masks].tolist()
        elif self.column is not None:
            keys = listed = self.column.lookup(annotations.mask_id[masks])
        else:  # the phrases of a file in COCO's format, of which some may have no mask
            fields = [] if origin is None else origin["fields"][masks].tolist()
            keys = [json.loads(one).get("text_input") for one in fields]
            listed = [*(annotations.texts() or ()), *keys]
            if not listed:
                raise BadValue(f"image {sample.image_id}: has no phrases; pass phrases=, a table by mask_id")
        groups: dict[Any, list[int]] = {key: [] for key in listed if key is not None}
        for mask, key in zip(masks.tolist(), keys, strict=False):
            if key in groups:
                groups[key].append(mask)
        return groups
