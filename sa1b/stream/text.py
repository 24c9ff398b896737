"""Texts of the images or masks of a batch: captions, phrases or precomputed embeddings, as tensors.

    text = sa1b.Text("captions.parquet", column="caption", key="mask_id", tokenizer="bpe.json", length=32)
    stream = sa1b.Stream("shards", global_batch=256, text=text)
    for batch in sa1b.Loader(stream, device="cuda"):
        tokens, given = batch.texts.padded()  # int64 [M, 32] and bool [M, 32], on the device
        batch.extra["caption"]                # list [M] of str, the same texts

The table has a column of ids and a column of texts; see `sa1b.stream.columns`. A text is a string, or a list
of strings, of which each visit takes one: a hash of the seed, the image id, the epoch and the mask's index
decides, so that the choice is the same on any rank, worker or thread. Instead of strings there may be
lists of float of one length, which are embeddings that a text encoder computed before, or lists of these.

    sa1b.Stream("images", masks=0, text="texts")

"texts" means those that stood beside the images in their sources, which `sa1b reshard --images-only` stores.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from sa1b.arguments import BadValue, whole_number
from sa1b.errors import UsageError
from sa1b.hashing import Purpose, below, random_words
from sa1b.stream.columns import KEYS, Column, ColumnError, open_columns
from sa1b.stream.ragged import Tensors

if TYPE_CHECKING:
    import pyarrow as pa

    from sa1b.shards.dataset import Dataset

Int64 = npt.NDArray[np.int64]
Row = tuple[int, npt.NDArray[Any]]  # the key of a text, and its tokens or vector
Key = Literal["image_id", "mask_id"]
TEXTS = "texts"  # the source that means the texts of the dataset directory
BYTES = "bytes"
_FORMS = f"{BYTES!r}, the path of a .json file of the library tokenizers, or MODULE:FUNCTION"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer."""

    name: str  # the name or path that it was opened with
    encode: Callable[[str], Sequence[int]]  # text -> tokens, integers from 0 to vocabulary - 1
    vocabulary: int | None  # number of different tokens; None if a function does not state it


@dataclass(frozen=True, slots=True, eq=False)
class Texts(Tensors):
    """One text for each of N images or masks, as tokens or as vectors.

    Attributes:
        tokens: int32 [T], the tokens of all texts.
        offsets: int64 [N + 1] into tokens; a text without tokens has none.
        vectors: float32 [N, D], precomputed embeddings; D is 0 if there are tokens.
        keys: int64 [N], a hash of each text: equal texts have equal keys. -1 where there is no text.
        key: "image_id" if the texts are those of the images, "mask_id" if they are those of the masks.
        length: largest number of tokens of a text; longer ones are cut.
    """

    tokens: Tensor
    offsets: Tensor
    vectors: Tensor
    keys: Tensor
    key: Key
    length: int

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def given(self) -> Tensor:
        """Which of the images or masks have a text: bool [N]."""
        return self.keys >= 0

    def padded(self, length: int | None = None) -> tuple[Tensor, Tensor]:
        """The tokens, int64 [N, length], 0 after the end of a text, and which of them belong to the text.

        The host does not wait for the device.

        Args:
            length: tokens of each row; by default `self.length`.
        """
        columns = torch.arange(self.length if length is None else length, device=self.tokens.device)
        belongs = columns < self.offsets.diff()[:, None]
        index = torch.where(belongs, self.offsets[:-1, None] + columns, len(self.tokens))
        return pad(self.tokens, (0, 1))[index].long(), belongs


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A table of texts for `Stream(text=...)`.

    Attributes:
        source: path or URL of a table, or a pyarrow table; see sa1b.stream.columns. "texts": the texts that
            the dataset directory has of its own; `column` is then without effect. An id may have several
            rows; of conversations in LLaVA's form, the texts are the answers.
        column: column of the texts.
        key: column of the ids, "image_id" or "mask_id"; None: mask_id if there is one, else image_id.
        tokenizer: "bytes", a file of the library tokenizers, or MODULE:FUNCTION; see `open_tokenizer`.
        length: largest number of tokens of a text; longer ones are cut.

    Raises:
        ValueError: an argument is invalid; the message names it.
    """

    source: "str | os.PathLike[str] | pa.Table | Column"
    column: str = "text"
    key: Key | None = None
    tokenizer: str | os.PathLike[str] = BYTES
    length: int = 64

    def __post_init__(self) -> None:
        if self.key not in (None, *KEYS):
            raise BadValue(f"key={self.key!r} must be {' or '.join(map(repr, KEYS))}")
        if callable(self.tokenizer):
            raise BadValue(f"tokenizer={self.tokenizer!r} must be a name, such as MODULE:FUNCTION")
        object.__setattr__(self, "length", whole_number("length", self.length, 1))


class TextColumn:
    """An open table of texts."""

    def __init__(self, options: Text, column: Column) -> None:
        import pyarrow as pa

        from sa1b.shards.image_ids import is_text

        self.options, self.column = options, column
        source, name = column.source, column.name
        innermost, lists = column.kind, 0
        while hasattr(innermost, "value_type"):
            innermost, lists = innermost.value_type, lists + 1
        embeds = pa.types.is_floating(innermost)
        self.several = lists - embeds == 1  # an id has a list of texts; an embedding is a list itself
        if not (embeds or is_text(innermost)) or lists - embeds not in (0, 1):
            raise ColumnError(
                f"{source}: column {name!r} is {column.kind}; texts are strings or lists of strings, "
                "embeddings lists of float or lists of these"
            )
        texts = column.values.flatten() if self.several else column.values
        row = texts.is_valid().index(True).as_py()
        first = [] if row < 0 else texts[row].as_py()
        if first == []:
            raise ColumnError(
                f"{source}: column {name!r} has no value in any of its {len(column):,} rows; pass a table "
                "with texts"
            )
        # None: the table has embeddings
        self.tokenizer = None if embeds else open_tokenizer(options.tokenizer)
        self.width = len(first) if embeds else 0  # numbers of an embedding

    def __reduce__(self) -> tuple[type["TextColumn"], tuple[Text, Column]]:
        return TextColumn, (self.options, self.column)

    @property
    def vocabulary(self) -> int | None:
        """Number of different tokens; None if the table has embeddings or the tokenizer does not state it."""
        return None if self.tokenizer is None else self.tokenizer.vocabulary

    def record(self) -> str:
        """A description for the state of a stream, equal where texts are equal."""
        read = "embeddings" if self.tokenizer is None else f"{self.tokenizer.name}, {self.options.length}"
        return f"{self.column.name} of {self.column.source} by {self.column.key} ({read})"

    def read(
        self, seed: int, ids: Int64, images: Int64, epochs: Int64, indices: Int64
    ) -> tuple[list[Any], list[Row | None]]:
        """The texts of N images or masks as Python values, and as rows of `Texts`; None: there is no text.

        `ids` are those of images or masks, according to the key; `images` and `epochs` those of their visits;
        `indices` those of masks in their records, 0 for images: all int64 [N]. ColumnError if embeddings have
        different lengths or NaN, or if the tokenizer returns something else.
        """
        values = self.column.lookup(ids)
        if self.several:
            counts = np.array([len(value or ()) for value in values], np.int64)
            words = random_words(seed, Purpose.TEXT, images, epochs, indices)
            chosen = below(words, np.maximum(counts, 1)).tolist()
            values = [value[index] if value else None for value, index in zip(values, chosen, strict=True)]
        if self.tokenizer is not None:
            return values, _rows(values, self.tokenizer, self.options.length)
        rows = zip(values, ids.tolist(), strict=True)
        return values, [None if value is None else self._vector(value, one) for value, one in rows]

    def _vector(self, value: list[float], one: int) -> Row:
        vector = np.array(value, np.float32)  # a null becomes NaN
        if len(value) != self.width or not np.isfinite(vector).all():
            lengths = f"of {len(value)} numbers, others have {self.width}"
            fault = lengths if len(value) != self.width else "with NaN or an infinite number"
            which = f"{self.column.key} {one} has an embedding {fault}"
            raise ColumnError(f"{self.column.source}: {which}; correct or remove its row")
        return _key(vector.tobytes()), vector


def texts_of(values: Sequence[str | None], tokenizer: Tokenizer, length: int, key: Key) -> Texts:
    """The tokens of N texts, cut to `length`; None: no text. ColumnError if the tokenizer returns none."""
    return joined(_rows(values, tokenizer, length), key, length)


def _rows(values: Sequence[str | None], tokenizer: Tokenizer, length: int) -> list[Row | None]:
    return [
        None if value is None else (_key(value.encode()), _tokens(value, tokenizer)[:length])
        for value in values
    ]


def joined(rows: Sequence[Row | None], key: Key, length: int, width: int = 0) -> Texts:
    """The texts of rows, which have `width` numbers of an embedding, or tokens if it is 0."""
    nothing = -1, np.zeros(width, np.float32 if width else np.int32)
    keys, arrays = [(row or nothing)[0] for row in rows], [(row or nothing)[1] for row in rows]
    tokens = [np.zeros(0, np.int32)] * len(rows) if width else arrays
    return Texts(
        tokens=torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *tokens])),
        offsets=torch.from_numpy(np.cumsum([0, *map(len, tokens)], dtype=np.int64)),
        vectors=torch.from_numpy(np.array(arrays if width else [], np.float32).reshape(len(rows), width)),
        keys=torch.tensor(keys, dtype=torch.int64),
        key=key,
        length=length,
    )


def open_text(text: Any, dataset: "Dataset", storage_options: Any = None) -> TextColumn | None:
    """Open the table of `Stream(text=...)`: a `Text`, a source with its default options, or an open one.

    The source TEXTS means the dataset's own texts. ColumnError if it is not a table of texts; UsageError if
    there is no such tokenizer.
    """
    if text is None or isinstance(text, TextColumn):
        return text
    options = text if isinstance(text, Text) else Text(text)
    name, source = options.column, options.source
    if source == TEXTS:
        from sa1b.shards.index_file import stored_texts

        name, source = TEXTS, stored_texts(dataset.reader, dataset.shards)
        if source is None:
            raise ColumnError(
                f"{dataset.root}: no image has a text of its source; sa1b reshard --images-only stores those "
                "of .txt and .json files beside the images and of columns of Parquet; or pass a table"
            )
    opened = open_columns(
        {name: source}, storage_options, key=options.key, texts=True, dataset=dataset, argument="text"
    )
    return TextColumn(options, opened[name])


def _tokens(value: str, tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    name, end = tokenizer.name, (1 << 31 if tokenizer.vocabulary is None else tokenizer.vocabulary)
    try:
        tokens = np.array(tokenizer.encode(value), np.int64).reshape(-1)
    except (TypeError, ValueError) as error:
        raise ColumnError(f"tokenizer {name!r}: must return a list of int for {value!r} ({error})") from error
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < end:
        returned = f"returns {tokens.tolist()} for {value!r}"
        raise ColumnError(f"tokenizer {name!r}: {returned}; tokens must be from 0 to {end - 1}")
    return tokens.astype(np.int32)


def _key(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def open_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """A tokenizer by its name; UsageError if there is none, or no library tokenizers.

        open_tokenizer("bytes").encode("Grüße")        # the bytes of UTF-8, numbers from 0 to 255
        open_tokenizer("bpe.json")                     # tokenizers.Tokenizer.from_file("bpe.json")
        open_tokenizer("my_package.words:encode")      # my_package.words.encode(text) -> list of int

    The numbers of a function are from 0 to its attribute `vocabulary` - 1.
    """
    name = os.fspath(name)
    if name == BYTES:
        return Tokenizer(name, lambda text: bytearray(text.encode()), 256)
    if name.endswith(".json"):
        return _of_library(name)
    if ":" not in name:
        raise UsageError(f"tokenizer {name!r}: must be {_FORMS}")
    try:
        called: Any = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        way = f"set PYTHONPATH to the folder of the module, or pass {_FORMS}"
        raise UsageError(f"tokenizer {name!r}: cannot be imported ({error}); {way}") from error
    return Tokenizer(name, called, getattr(called, "vocabulary", None))


def _of_library(path: str) -> Tokenizer:
    if not Path(path).is_file():
        raise UsageError(f"tokenizer {path!r}: there is no such file; pass {_FORMS}")
    try:
        library: Any = import_module("tokenizers")
        opened = library.Tokenizer.from_file(path)
    except ImportError:
        way = "install it with: pip install 'sa1b[text]'"
        raise UsageError(f"tokenizer {path!r}: the package tokenizers is missing; {way}") from None
    except Exception as error:  # the library raises Exception itself
        why = f"is no file of the library tokenizers ({error}); write it with Tokenizer.save"
        raise UsageError(f"tokenizer {path!r}: {why}") from error
    opened.no_padding()
    opened.no_truncation()
    return Tokenizer(path, lambda text: opened.encode(text).ids, opened.get_vocab_size())
