"""Texts of images and masks become tensors: aligned, sampled by a counter, the same in workers."""

import json
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
from sa1b.errors import UsageError
from sa1b.stream.columns import ColumnError
from sa1b.stream.text import Texts, open_tokenizer
from tests.stream.recorded import FIRST_ID, make_root

IMAGES = 12
IDS = list(range(FIRST_ID, FIRST_ID + IMAGES))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("texts"), IMAGES)


@pytest.fixture(scope="module")
def mask_ids(root: Path) -> list[int]:
    return np.concatenate([sample.annotations.mask_id for sample in sa1b.open(root)]).tolist()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def stream_of(root: Path, text: Any, **options: Any) -> sa1b.Stream:
    named = {"global_batch": 4, "micro_batch": 2, "image_size": 32, "masks": 4, **options}
    return sa1b.Stream(root, damage_log=root.parent / "log.jsonl", text=text, **named)


def spoken(texts: Texts) -> list[str]:
    """Byte-level tokens as strings."""
    tokens, given = texts.padded()
    return [bytes(row[own].tolist()).decode(errors="replace") for row, own in zip(tokens, given, strict=True)]


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


words.vocabulary = 100  # type: ignore[attr-defined]


def test_phrases_by_mask_are_padded_and_ragged_tensors(
    root: Path, mask_ids: list[int], tmp_path: Path
) -> None:
    known = mask_ids[::2]
    table = pa.table({"mask_id": known, "image_id": [0] * len(known), "text": [f"ö{one}" for one in known]})
    path = tmp_path / "phrases.parquet"
    pq.write_table(table, path)
    seen = 0
    for batch in islice(sa1b.Loader(stream_of(root, path), quiet=True, threads=1), 6):
        texts = batch.texts
        expected = [f"ö{one}" if one in known else None for one in batch.mask_ids.tolist()]
        assert batch.extra["text"] == expected
        assert spoken(texts) == [one or "" for one in expected]
        assert texts.given.tolist() == [one is not None for one in expected]
        assert texts.offsets.diff().tolist() == [len((one or "").encode()) for one in expected]
        assert texts.key == "mask_id"
        short, belongs = texts.padded(3)
        assert short.shape == belongs.shape == (len(texts), 3)
        keys = dict(zip(expected, texts.keys.tolist(), strict=True))
        assert len(set(keys.values())) == len(keys)
        seen += len(texts)
    assert seen > 12


def test_one_of_several_captions_is_taken_by_a_counter(root: Path) -> None:
    table = pa.table({"image_id": IDS, "caption": [[f"{one}a", f"{one}b", f"{one}c"] for one in IDS]})
    text = sa1b.Text(table, column="caption", length=100)
    stream = stream_of(root, text)
    epochs = [[(batch.ids.tolist(), batch.extra["caption"]) for batch in stream] for _ in range(4)]
    taken: dict[int, set[str]] = {}
    for epoch in epochs:
        for ids, values in epoch:
            for one, value in zip(ids, values, strict=True):
                assert value[:-1] == str(one)
                taken.setdefault(one, set()).add(value[-1])
    assert any(len(letters) > 1 for letters in taken.values())
    again = DataLoader(stream_of(root, text), batch_size=None, num_workers=2)
    first = [(batch.ids.tolist(), batch.extra["caption"]) for batch in again]
    assert first == epochs[0]
    assert stream.state_dict()["options"]["text"].startswith("caption of ")


def test_a_phrase_of_a_list_is_sampled_for_each_mask(root: Path, mask_ids: list[int]) -> None:
    table = pa.table({"mask_id": mask_ids, "text": [["even", "odd"]] * len(mask_ids)})
    values = [value for batch in stream_of(root, table) for value in batch.extra["text"]]
    assert {*values} == {"even", "odd"}
    assert 0.2 < values.count("odd") / len(values) < 0.8


def test_precomputed_embeddings_are_vectors(root: Path, mask_ids: list[int]) -> None:
    vectors = [[one % 7, 0.5, -1.0] for one in mask_ids]
    table = pa.table({"mask_id": mask_ids, "text": pa.array(vectors, pa.list_(pa.float32()))})
    batch = next(iter(stream_of(root, table)))
    texts = batch.texts
    assert texts.vectors.tolist() == [[one % 7, 0.5, -1.0] for one in batch.mask_ids.tolist()]
    same = texts.vectors[:, None, 0] == texts.vectors[None, :, 0]
    assert torch.equal(same, texts.keys[:, None] == texts.keys[None])
    assert not len(texts.tokens)


def test_the_key_is_chosen_if_the_table_has_both(root: Path, mask_ids: list[int]) -> None:
    table = pa.table({"mask_id": mask_ids[:IMAGES], "image_id": IDS, "text": [str(one) for one in IDS]})
    batch = next(iter(stream_of(root, sa1b.Text(table, key="image_id"))))
    assert spoken(batch.texts) == [str(one) for one in batch.ids.tolist()]
    assert batch.texts.key == "image_id"


def test_a_table_of_other_masks_causes_one_warning(root: Path, mask_ids: list[int]) -> None:
    table = pa.table({"mask_id": [one + 1_000_000_000 for one in mask_ids], "text": ["a"] * len(mask_ids)})
    stream = stream_of(root, table, epochs=None, masks=100)
    with pytest.warns(
        UserWarning, match=r"has no text for any of the first 1,\d+ ids; are its mask_ids"
    ) as seen:
        for _ in islice(stream, 2 * 1000 * IMAGES // len(mask_ids)):
            pass
    assert len(seen) == 1


def test_texts_move_with_the_batch(root: Path) -> None:
    table = pa.table({"image_id": IDS, "text": [str(one) for one in IDS]})
    batch = next(iter(stream_of(root, table)))
    packed = batch.pack(lambda size: torch.empty(size, dtype=torch.uint8))
    assert spoken(packed.texts) == spoken(batch.texts) == [str(one) for one in batch.ids.tolist()]
    assert packed.texts.tokens.data_ptr() >= packed.buffer.data_ptr()


def test_tokenizers_of_the_library_and_functions(tmp_path: Path) -> None:
    document = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"red": 0, "box": 1, "?": 2}, "unk_token": "?"},
    }  # fmt: skip
    (tmp_path / "words.json").write_text(json.dumps(document))
    opened = open_tokenizer(tmp_path / "words.json")
    assert (list(opened.encode("box of red")), opened.vocabulary) == ([1, 2, 0], 3)
    opened = open_tokenizer("tests.stream.test_text:words")
    assert (opened.encode("box of red"), opened.vocabulary) == ([3, 2, 3], 100)
    assert list(open_tokenizer("bytes").encode("é")) == [195, 169]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ({"image_id": IDS, "text": IDS}, ColumnError, "column 'text' is int64; texts are strings or lists"),
        (sa1b.Text(pa.table({"image_id": IDS, "t": ["a"] * 12})), ColumnError, "no column 'text'"),
        (sa1b.Text(pa.table({"image_id": IDS, "text": ["a"] * 12}), key="mask_id"), ColumnError,
         "no column 'mask_id' to join 'text' by; choose from image_id, text"),
        (sa1b.Text(pa.table({"image_id": IDS, "text": ["a"] * 12}), tokenizer="no.json"), UsageError,
         "tokenizer 'no.json': cannot be opened (No such file"),
        (sa1b.Text(pa.table({"image_id": IDS, "text": ["a"] * 12}), tokenizer="sp"), UsageError,
         "tokenizer 'sp': cannot be opened (no MODULE:FUNCTION"),
        (sa1b.Text("no.parquet"), ColumnError, "^text: /.*/no.parquet does not exist; give the path of a table"),
        (sa1b.Text("no.xml"), ColumnError, "^text: no.xml is no table; its name must end with one of .parquet"),
        ({"image_id": [1], "text": pa.array([None], pa.string())}, ColumnError, "'text' has no value in any of"),
        ({"image_id": [1], "text": pa.array([[]], pa.list_(pa.string()))}, ColumnError, "has no value in any"),
        ({"image_id": pa.array([], pa.int64()), "text": pa.array([], pa.string())}, ColumnError, "its 0 rows"),
        (sa1b.Text(pa.table({"image_id": IDS, "text": ["a"] * 12}), tokenizer="json:nothing"), UsageError,
         "cannot be opened (module 'json' has no"),
        ({"image_id": [1], "text": ["a"]}, ColumnError, "^text: the pyarrow table has none of the 12 images"),
        ({"image_id": [*IDS, IDS[0]], "text": [[0.5]] * 13}, ColumnError, "collect the values of an id in a"),
    ],
)  # fmt: skip
def test_what_is_refused(root: Path, text: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace("(", r"\(")):
        stream_of(root, pa.table(text) if isinstance(text, dict) else text)


def test_rows_of_one_image_and_answers_of_conversations_are_its_texts(root: Path, tmp_path: Path) -> None:
    """In the form of LLaVA's lists."""
    rows = [
        {
            "id": f"sa_{one}",
            "image": f"sam/images/sa_{one}.jpg",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat is this?"},
                {"from": "gpt", "value": f"first {one}"},
                *[{"from": "human", "value": "And?"}, {"from": "gpt", "value": f"second {one}"}]
                * (one == IDS[0]),
            ],
        }
        for one in [*IDS, IDS[1]]
    ]
    (tmp_path / "llava.json").write_text(json.dumps(rows))
    text = sa1b.Text(tmp_path / "llava.json", column="conversations")
    column = stream_of(root, text).text.column
    assert column.lookup(np.array(IDS[:3])) == [
        [f"first {IDS[0]}", f"second {IDS[0]}"],
        [f"first {IDS[1]}", f"first {IDS[1]}"],
        [f"first {IDS[2]}"],
    ]


def test_embeddings_of_different_lengths_and_bad_tokens_name_the_cause(root: Path) -> None:
    table = pa.table({"image_id": IDS, "text": [[0.5] * (1 + one % 2) for one in IDS]})
    with pytest.raises(ColumnError, match=r"image_id \d+ has an embedding of \d numbers, others have \d"):
        list(stream_of(root, table))
    table = pa.table({"image_id": IDS, "text": [[0.5, float("nan") if one == IDS[3] else 1] for one in IDS]})
    with pytest.raises(
        ColumnError, match=f"image_id {IDS[3]} has an embedding with NaN or an infinite number"
    ):
        list(stream_of(root, table))
    long = pa.table({"image_id": IDS, "text": ["x" * 200] * 12})
    with pytest.raises(ColumnError, match=r"returns \[200\] for .*; tokens must be from 0 to 99"):
        next(iter(stream_of(root, sa1b.Text(long, tokenizer="tests.stream.test_text:words"))))
    with pytest.raises(ValueError, match="length"):
        sa1b.Text("captions.parquet", length=0)


def test_an_object_by_image_gives_prompts_of_images_and_captions_of_masks(root: Path, tmp_path: Path) -> None:
    """In the form of SA-Z.json, which SACap-1M's authors publish."""
    dataset = sa1b.open(root)
    document = {
        f"sa_{sample.image_id}": {
            "image_id": f"sa_{sample.image_id}",
            "folder_name": "sa_000000",
            "image_path": f"images/sa_000000/sa_{sample.image_id}.jpg",
            "prompt": f"image {sample.image_id}",
            "mask_annotation": [
                {"id": mask_id, "bbox": [0, 0, 1, 1], "caption": f"mask {mask_id}"}
                for mask_id in sample.annotations.mask_id.tolist()
            ],
            "pred_order": [[0, 1], [0, 0]],
        }
        for sample in dataset
    }
    path = tmp_path / "SA-Z.json"
    path.write_text(json.dumps(document))
    only = {name: {"prompt": entry["prompt"]} for name, entry in document.items()}
    (tmp_path / "prompts.json").write_text(json.dumps(only))
    for source in (path, tmp_path / "prompts.json"):
        stream = sa1b.Stream(root, global_batch=4, image_size=32, epochs=1, join={"prompt": source})
        for batch in sa1b.Loader(stream, quiet=True):
            assert batch.extra["prompt"] == [f"image {one}" for one in batch.ids]
    text = sa1b.Text(path, column="caption")
    stream = sa1b.Stream(root, global_batch=4, image_size=32, epochs=1, masks=2, text=text)
    for batch in sa1b.Loader(stream, quiet=True):
        assert batch.texts.key == "mask_id"
        assert batch.extra["caption"] == [f"mask {one}" for one in batch.mask_ids.tolist()]
    every = "image_id, folder_name, image_path, prompt, mask_annotation"
    with pytest.raises(sa1b.errors.Sa1bError, match=f"no column 'summary'; choose from {every}"):
        sa1b.Stream(root, global_batch=4, join={"summary": path})
