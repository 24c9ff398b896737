"""The settings of dataset, choice of samples and batch sizes."""

import contextlib
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sa1b.arguments import Range, check_cache_flags, check_fields
from sa1b.console import counted
from sa1b.errors import UsageError
from sa1b.stream.sample import Strategy
from sa1b.stream.text import Key, Text
from sa1b.stream.tokenizer import BYTES
from sa1b.workers import memory_limit


def with_flags(error: ValueError) -> UsageError:
    """Convert an error about arguments of `Stream` to one about the flags that set them."""
    names = "|".join(setting.name for setting in fields(DataConfig))
    message = re.sub(rf"\b({names})=", lambda match: f"--data.{match[1].replace('_', '-')} ", str(error))
    return UsageError(message if message.startswith("--data.") else f"--data: {message}")


def available_memory() -> float:
    """Bytes that this process can still use, by the machine and its cgroups; infinite: not known."""
    free = math.inf
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min(free, memory_limit())


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Dataset, choice of samples and batch sizes.

    Attributes:
        root: Folder that `sa1b reshard` made, or its URL (s3://...).
        mix: File of several datasets and their weights (YAML), instead of a root:
            `sources: {NAME: {root: FOLDER, weight: 1}}`; see the page Mixing datasets.
        view: Name, digest or path of the view to train on (made by `sa1b view`); by default all images.
        layers: Layers of masks that training reads with the shards, in this order (made by `sa1b layer add`).
        global_batch: Images of a step over all ranks.
        micro_batch: Images that a rank computes at a time; by default its complete share of a step. A smaller
            value takes less memory and does not change the step.
        masks: Largest number of masks per image; 0: images only, for models that read no mask.
        strategy: How masks are chosen. uniform: all are equally likely. area: one mask of each class of
            sizes. quality: masks with high scores more often. coverage: all masks within as few epochs as
            possible.
        flip: Probability of mirroring an image left and right.
        min_pixels: Masks with fewer pixels at the target size are not trained on; evaluations include them.
        block_size: Neighbouring images that are read together, for disks that are slow at random reads.
        target_size: Size in pixels of the square in which losses and scores are computed; by default a
            quarter of the image size, which is the size of the decoder's masks.
        threads: Threads of each rank that read and decode; by default its share of the CPUs, at most 8.
        prefetch: Micro-batches that are prepared in advance.
        decode: Where JPEG files are decoded: cpu, or gpu (needs the extra gpu). auto: on the CPU, until rates
            on a GPU are known. Pixels differ slightly, so keep one choice for a whole run.
        endpoint: URL of an object store other than Amazon's, by default $AWS_ENDPOINT_URL; without that
            variable, also of --out and --init.
        deadline: Seconds that a read may take over all its attempts before training stops.
        cache: Folder on a local disk that caches the data read from a URL; later epochs read it from there.
            Samples do not change.
        cache_bytes: Limit of the cache for the dataset directory, in bytes; required with a cache.
        text: Table of texts of images or masks, for models that read text: Parquet, JSON, JSON lines, CSV or
            TSV, as path or URL. If an id has several texts (a list), each visit takes one of them.
        text_column: Column of the texts: strings, lists of strings, or embeddings (lists of numbers).
        text_key: Column of the ids; by default mask_id if the table has one, else image_id.
        text_tokens: Largest number of tokens of a text; longer texts are truncated.
        text_width: Numbers of an embedding, if the column has embeddings; 0: it has strings.
        tokenizer: How texts become numbers: bytes (of UTF-8), a .json file of the library tokenizers, or
            MODULE:FUNCTION, a function that returns a list of int for a text.
    """

    root: str = ""
    mix: str | None = None
    view: str | None = None
    layers: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: none)")] = ()
    global_batch: Annotated[int, Range(1)] = 256
    micro_batch: Annotated[int | None, Range(1)] = None
    masks: Annotated[int, Range(0)] = 64
    strategy: Strategy = "uniform"
    flip: Annotated[float, Range(0, 1)] = 0.0
    min_pixels: Annotated[int, Range(0)] = 0
    block_size: Annotated[int, Range(1)] = 1
    target_size: Annotated[int | None, Range(1)] = None
    threads: Annotated[int | None, Range(1)] = None
    prefetch: Annotated[int, Range(1)] = 2
    decode: Literal["auto", "cpu", "gpu"] = "auto"
    endpoint: str | None = None
    deadline: Annotated[float, Range(above=0, unit=" seconds")] = 300.0
    cache: str | None = None
    cache_bytes: Annotated[int | None, Range(1)] = None
    text: str | None = None
    text_column: str = "text"
    text_key: Key | None = None
    text_tokens: Annotated[int, Range(1)] = 64
    text_width: Annotated[int, Range(0)] = 0
    tokenizer: str = BYTES

    def __post_init__(self) -> None:
        check_fields(self, "data")
        check_cache_flags("--data.cache", self.cache, self.cache_bytes)
        if self.text is None and (self.text_key, self.text_column) != (None, "text"):
            flag = "--data.text-key" if self.text_key is not None else "--data.text-column"
            raise UsageError(f"{flag}: is a column of a table of texts; also pass --data.text")

    def check_text(self, settings: str, *, reads_text: bool) -> None:
        """Refuse a table of texts for a model that reads none, with a UsageError."""
        if self.text is not None and not reads_text:
            raise UsageError(
                f"--data.text {self.text}: the model of {settings} reads no text; drop it, or pass "
                "--preset grounding"
            )

    def check_memory(self, images: int, image_size: int) -> None:
        """Refuse micro-batches that do not fit this machine: their pixels and one mask for each image.
        UsageError: the message names the flag, the needed and the available bytes.
        """
        target, available = self.target_size or image_size // 4, available_memory()
        masks = target**2 if self.masks else 0
        needed = images * (3 * image_size**2 + masks)
        if needed <= available:
            return
        flag = "global_batch" if self.micro_batch is None else "micro_batch"
        if self.target_size is not None and masks > 3 * image_size**2:
            flag = "target_size"
        name = f"--data.{flag.replace('_', '-')}"
        raise UsageError(
            f"{name} {getattr(self, flag)}: a micro-batch of {counted(images, 'image')} takes {needed:,} "
            f"bytes ({image_size} pixels, masks of {target} pixels), and {available:,.0f} are available; "
            f"pass a smaller {'--data.micro-batch' if flag == 'global_batch' else name} or image size"
        )

    def texts(self) -> Text | None:
        """The table of texts; None without one."""
        if self.text is None:
            return None
        return Text(self.text, self.text_column, self.text_key, self.tokenizer, self.text_tokens)
