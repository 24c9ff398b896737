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
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from sa1b.arguments import whole_number
from sa1b.errors import Sa1bError, UsageError
from sa1b.stream.ragged import Tensors

if TYPE_CHECKING:
    import pyarrow as pa

KEYS = ("mask_id", "image_id")
Row = tuple[int, npt.NDArray[Any]]  # the key of a text, and its tokens or vector
Key = Literal["image_id", "mask_id"]
BYTES = "bytes"
_FORMS = (
    f"{BYTES!r}, the path of a .json file of the library tokenizers (pip install 'sa1b[text]'), or "
    "MODULE:FUNCTION of a module that PYTHONPATH finds"
)


class ColumnError(Sa1bError):
    """A source that cannot be joined; the message names the column, the source and the reason."""


class Tokenizer(NamedTuple):
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

    source: "str | os.PathLike[str] | pa.Table"
    column: str = "text"
    key: Key | None = None
    tokenizer: str | os.PathLike[str] = BYTES
    length: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", whole_number("length", self.length, 1))


def texts_of(values: Sequence[str | None], tokenizer: Tokenizer, length: int, key: Key) -> Texts:
    """The tokens of N texts, cut to `length`; None: no text. ColumnError if the tokenizer returns none."""
    return joined(tokenized(values, tokenizer, length), key, length)


def tokenized(values: Sequence[str | None], tokenizer: Tokenizer, length: int) -> list[Row | None]:
    name, rows = tokenizer.name, list[Row | None]()
    end = 1 << 31 if tokenizer.vocabulary is None else tokenizer.vocabulary
    for value in values:
        if value is None:
            rows.append(None)
            continue
        try:
            tokens = np.array(tokenizer.encode(value), np.int64).reshape(-1)
        except (TypeError, ValueError) as error:
            returns = f"must return a list of int for {value!r} ({error})"
            raise ColumnError(f"tokenizer {name!r}: {returns}") from error
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < end:
            returned = f"returns {tokens.tolist()} for {value!r}"
            raise ColumnError(f"tokenizer {name!r}: {returned}; tokens must be from 0 to {end - 1}")
        rows.append((key_of(value.encode()), tokens.astype(np.int32)[:length]))
    return rows


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


def key_of(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def open_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """A tokenizer by its name; UsageError if there is none, or no library tokenizers.

        open_tokenizer("bytes").encode("Grüße")        # the bytes of UTF-8, numbers from 0 to 255
        open_tokenizer("bpe.json")                     # tokenizers.Tokenizer.from_file("bpe.json")
        open_tokenizer("my_package.words:encode")      # my_package.words.encode(text) -> list of int

    The numbers of a function are from 0 to its attribute `vocabulary` - 1.
    """
    if name == BYTES:
        return Tokenizer(name, lambda text: bytearray(text.encode()), 256)
    try:
        name = os.fspath(name)
        if not name.endswith(".json"):
            if ":" not in name:
                raise ImportError("no MODULE:FUNCTION")
            called: Any = resolve_name(name)
            return Tokenizer(name, called, getattr(called, "vocabulary", None))
        opened: Any = import_module("tokenizers").Tokenizer.from_file(name)
    except Exception as error:  # the library raises Exception itself
        raise UsageError(f"tokenizer {name!r}: cannot be opened ({error}); pass {_FORMS}") from error
    opened.no_padding()
    opened.no_truncation()
    return Tokenizer(name, lambda text: opened.encode(text).ids, opened.get_vocab_size())
