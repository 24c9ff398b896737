"""Shards for SAM 3's training code, in place of its `COCO_FROM_JSON` and the files that it reads."""

import json
from typing import Any, Unpack

import numpy as np
import torch

from sa1b.arguments import BadValue, of_type, whole_number
from sa1b.integrations import ViewOptions, ViewSamples, position_of, register, takes_view
from sa1b.masks import geometry
from sa1b.shards.annotation import Annotations
from sa1b.shards.manifest import READING
from sa1b.stream.columns import Column, open_columns


class PhraseLoader:
    """The images of a view, their queries and their masks: the contract of SAM 3's `coco_json_loader`.

    Args:
        root: folder that `sa1b reshard` made, or its URL.
        phrases: table with columns `mask_id` and `column`; masks without a row are left out. None: the
            `text_input` of the masks, and the texts of the image, of which some may have no mask, from a
            file in COCO's format.
        column: of the table, strings.
        categories: the queries are the categories of such a file in place of phrases, as those of
            `COCO_FROM_JSON`, in the order of their ids.
        include_negatives: also queries without a mask.
        category_chunk_size: of a datapoint, the number of categories at most; None: all. An image has a
            datapoint for each chunk.
        options: `view`, the name of a view, and arguments of `sa1b.open`.
    """

    @takes_view
    def __init__(
        self,
        root: str,
        *,
        phrases: str | None = None,
        column: str = "text",
        categories: bool = False,
        include_negatives: bool = True,
        category_chunk_size: int | None = None,
        **options: Unpack[ViewOptions],
    ) -> None:
        self.samples = ViewSamples(root, **options)
        self.include_negatives = of_type("include_negatives", include_negatives, bool)
        self.column: Column | None = None
        if phrases is not None:
            if not isinstance(column, str) or column in ("", "mask_id"):
                raise BadValue(f"column={column!r}: not the name of a column of strings")
            given, stored = {column: phrases}, options.get("storage_options")
            self.column = open_columns(given, stored, key="mask_id", texts=True, argument="phrases")[column]
            if str(self.column.kind) not in ("string", "large_string"):
                raise BadValue(f"column={column!r}: holds {self.column.kind}; name a column of strings")
        sources = self.samples.dataset.manifest.get(READING, {}).values()
        listed = [category for source in sources for category in source.get("categories", ())]
        if of_type("categories", categories, bool) and not listed:
            raise BadValue(f"categories=True: {root} has none; they come from a file in COCO's format")
        self.names = {one["id"]: one["name"] for one in reversed(listed)} if categories else {}
        chunk = len(self.names) or 1 if category_chunk_size is None else category_chunk_size
        self.chunk = whole_number("category_chunk_size", chunk, 1)
        self.chunks = -(-len(self.names) // self.chunk) or 1
        register()

    def __call__(self, annotation_file: str) -> "PhraseLoader":
        """The loader itself; SAM 3 calls it with the name of a file, which is not read."""
        return self

    def getDatapointIds(self) -> range:
        """The numbers of all datapoints: those of an image, by position, follow each other."""
        return range(len(self.samples) * self.chunks)

    def loadImagesFromDatapoint(self, idx: int) -> list[dict[str, Any]]:
        """The entry of the image, whose `file_name` iopath opens in this process."""
        sample = self.samples.sample(self._located(idx)[0])
        ids = dict.fromkeys(("original_img_id", "coco_img_id"), sample.image_id)
        return [{"id": 0, "file_name": self.samples.path(sample), **ids}]

    def loadQueriesAndAnnotationsFromDatapoint(
        self, idx: int
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The queries of the image, and the masks of each in turn: bbox, float32 [4], x, y, width and height
        as parts of the image, area, that of the box, and segmentation, COCO's object of run lengths.
        """
        position, chunk = self._located(idx)
        annotations = self.samples.sample(position).annotations
        masks = self.samples.kept(self.samples.sample(position))
        queries: list[dict[str, Any]] = []
        order: list[int] = []
        for (category, text), chosen in self._groups(annotations, masks, chunk).items():
            if chosen or self.include_negatives:
                objects = list(range(len(order), len(order) + len(chosen)))
                order += chosen
                numbers = {"id": len(queries), "original_cat_id": category, "query_text": text}
                queries.append(_QUERY | numbers | {"object_ids_output": objects})
        runs, origin = annotations.runs(masks[order]), annotations.origin()
        crowd = np.zeros(len(annotations), np.int64) if origin is None else origin["iscrowd"]
        boxes = torch.from_numpy(geometry.bbox(runs).astype(np.float32))
        boxes = (boxes / torch.tensor([annotations.width, annotations.height] * 2)).clamp(0, 1)
        values = zip(boxes, runs.to_coco(text=True), crowd[masks[order]].tolist(), strict=True)
        return queries, [
            {"image_id": 0, "bbox": box, "area": (box[2] * box[3]).item(), "segmentation": segmentation,
             "object_id": number, "is_crowd": is_crowd, "id": number}
            for number, (box, segmentation, is_crowd) in enumerate(values)
        ]  # fmt: skip

    def _located(self, idx: int) -> tuple[int, int]:
        """The position and the chunk of a datapoint."""
        return divmod(position_of(idx, len(self.getDatapointIds())), self.chunks)

    def _groups(self, annotations: Annotations, masks: Any, chunk: int) -> dict[tuple[int, str], list[int]]:
        """Category and text of the queries, and which of `masks` each has."""
        origin, texts, keys = annotations.origin(), list[str](), list[Any]()
        ids = sorted(self.names)[chunk * self.chunk : (chunk + 1) * self.chunk]
        if self.column is not None and not ids:
            keys = self.column.lookup(annotations.mask_id[masks])
        elif origin is not None:
            keys = origin["category_id" if ids else "fields"][masks].tolist()
        if self.column is None and not ids:
            keys, texts = [json.loads(fields).get("text_input") for fields in keys], annotations.texts() or []
            if not texts and not keys:
                raise BadValue(
                    f"image {annotations.image_id}: has no phrases; pass phrases=, a table by mask_id"
                )
        groups: dict[Any, list[int]] = {key: [] for key in ids or [*texts, *keys] if key is not None}
        for number, key in enumerate(keys):
            if key in groups:
                groups[key].append(number)
        return {(key, self.names[key]) if self.names else (1, key): of for key, of in groups.items()}


_QUERY: dict[str, Any] = {
    "query_processing_order": 0, "image_id": 0, "is_exhaustive": True,
    **dict.fromkeys(("ptr_x_query_id", "ptr_y_query_id", "input_box", "input_box_label", "input_points")),
}  # fmt: skip
