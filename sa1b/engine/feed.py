"""The micro-batches of a training step: batches of the stream on the device, with dense masks.

feed = Feed(config.data, config.image_size, rank_info, config.folder, config.seed)
for batch in feed.step():
    module(*model.inputs(batch, config.seed))
state = feed.state_dict()
"""

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from sa1b.engine.ranks import RankInfo
from sa1b.errors import ManifestError, Sa1bError, UsageError
from sa1b.shards.dataset import Dataset
from sa1b.storage.errors import MissingError
from sa1b.storage.protocols import endpoint_options
from sa1b.stream.batch import Batch
from sa1b.stream.columns import ColumnError
from sa1b.stream.damage_log import DamageLog
from sa1b.stream.dataset import Stream
from sa1b.stream.loader import Loader
from sa1b.stream.sample import Strategy
from sa1b.stream.text import Key, Text
from sa1b.stream.tokenizer import BYTES


def with_flags(error: ValueError) -> UsageError:
    """Convert an error about arguments of `Stream` to one about the flags that set them."""
    names = "|".join(one.name for one in fields(DataConfig))
    message = re.sub(rf"\b({names})=", lambda found: f"--data.{found[1].replace('_', '-')} ", str(error))
    return UsageError(message if message.startswith("--data.") else f"--data: {message}")


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Dataset, choice of samples and batch sizes.

    Attributes:
        root: Folder that `sa1b reshard` made, or its URL (s3://...).
        view: Name, digest or path of the view to train on (made by `sa1b view`); by default all images.
        global_batch: Images of a step over all ranks.
        micro_batch: Images that a rank computes at a time; by default its complete share of a step. A smaller
            value takes less memory and does not change the step.
        masks: Largest number of masks per image; 0: images only, for models that read no mask.
        strategy: How masks are chosen. uniform: all are equally likely. area: one of each class of sizes.
            quality: more often those with high scores. coverage: all masks within as few epochs as
            possible.
        flip: Probability of mirroring an image left and right.
        min_pixels: Masks with fewer pixels at the target size are not trained on; evaluations include them.
        block_size: Neighbouring images that are read together, for disks that are slow at random reads.
        target_size: Size in pixels of the square in which losses and scores are computed; by default a
            quarter of the image size, which is the size of the decoder's masks.
        threads: Threads of each rank that read and decode; by default its share of the CPUs of the job.
        prefetch: Micro-batches that are prepared in advance.
        decode: Where JPEG files are decoded: cpu, or gpu (needs the extra gpu). auto: on the CPU, until rates
            on a GPU are known. Pixels differ slightly, so keep one choice for a whole run.
        endpoint: URL of an object store other than Amazon's.
        deadline: Seconds that a read may take over all its attempts before training stops.
        cache: Folder on a local disk that caches the data read from a URL; later epochs read it from there.
            Samples do not change.
        cache_bytes: Limit of the cache for the dataset directory, in bytes; required with a cache.
        text: Table of texts of images or masks, for models that read text: a Parquet file, a file of JSON
            lines, or its URL. If an id has several texts (a list), each visit takes one of them.
        text_column: Column of the texts: strings, lists of strings, or embeddings (lists of numbers).
        text_key: Column of the ids; by default mask_id if the table has one, else image_id.
        text_tokens: Largest number of tokens of a text; longer texts are truncated.
        text_width: Numbers of an embedding, if the column has embeddings; 0: it has strings.
        tokenizer: How texts become numbers: bytes (of UTF-8), a .json file of the library tokenizers, or
            MODULE:FUNCTION, a function that returns a list of int for a text.
    """

    root: str = ""
    view: str | None = None
    global_batch: int = 256
    micro_batch: int | None = None
    masks: int = 64
    strategy: Strategy = "uniform"
    flip: float = 0.0
    min_pixels: int = 0
    block_size: int = 1
    target_size: int | None = None
    threads: int | None = None
    prefetch: int = 2
    decode: Literal["auto", "cpu", "gpu"] = "auto"
    endpoint: str | None = None
    deadline: float = 300.0
    cache: str | None = None
    cache_bytes: int | None = None
    text: str | None = None
    text_column: str = "text"
    text_key: Key | None = None
    text_tokens: int = 64
    text_width: int = 0
    tokenizer: str = BYTES

    def __post_init__(self) -> None:
        for flag in (
            "global_batch",
            "micro_batch",
            "block_size",
            "target_size",
            "threads",
            "prefetch",
            "cache_bytes",
            "text_tokens",
        ):
            value = getattr(self, flag)
            if value is not None and value < 1:
                raise UsageError(f"--data.{flag.replace('_', '-')} {value}: must be at least 1")
        for flag in ("masks", "min_pixels", "text_width"):
            if getattr(self, flag) < 0:
                name = flag.replace("_", "-")
                raise UsageError(f"--data.{name} {getattr(self, flag)}: must be at least 0")
        if not 0 <= self.flip <= 1:
            raise UsageError(f"--data.flip {self.flip}: must be from 0 to 1")
        if not self.deadline > 0:
            raise UsageError(f"--data.deadline {self.deadline}: must be more than 0 seconds")
        if self.cache is not None and self.cache_bytes is None:
            raise UsageError(f"--data.cache {self.cache}: needs a limit; also pass --data.cache-bytes")
        if self.cache is None and self.cache_bytes is not None:
            raise UsageError(
                f"--data.cache-bytes {self.cache_bytes}: is the limit of a cache; also pass --data.cache"
            )
        if self.text is None and (self.text_key, self.text_column) != (None, "text"):
            flag = "--data.text-key" if self.text_key is not None else "--data.text-column"
            raise UsageError(f"{flag}: is a column of a table of texts; also pass --data.text")

    def check_text(self, settings: str, *, reads_text: bool) -> None:
        """Refuse a table of texts for a model that reads none.

        Raises:
            UsageError: when the model reads no text and ``text`` is given.
        """
        if self.text is not None and not reads_text:
            raise UsageError(
                f"--data.text {self.text}: the model of {settings} reads no text; drop it, or pass "
                "--preset grounding"
            )

    def texts(self) -> Text | None:
        """The table of texts; None without one."""
        if self.text is None:
            return None
        return Text(self.text, self.text_column, self.text_key, self.tokenizer, self.text_tokens)


class Feed:
    """The micro-batches of one rank.

    Args:
        config: dataset and batch sizes.
        image_size: image size of the model, pixels.
        rank_info: this rank.
        run: folder of the run, for the damage log.
        seed: seed of the order and of every random value.
        view: view to read instead of `config.view`.
        order: "sequential" for an evaluation.
        shares: shares of a step, one for each rank; None: all ranks have the same.
        divided: the ranks divide the images of a step; False: every rank reads all of them.

    Raises:
        UsageError: settings do not fit together; the message names the flag.
        StorageError: the data cannot be read.
    """

    def __init__(
        self,
        config: DataConfig,
        image_size: int,
        rank_info: RankInfo,
        run: Path,
        seed: int,
        *,
        view: str | None = None,
        order: Literal["shuffle", "sequential"] = "shuffle",
        shares: tuple[int, ...] | None = None,
        divided: bool = True,
    ) -> None:
        target_size = config.target_size or image_size // 4
        try:
            self.stream = Stream(
                config.root,
                global_batch=config.global_batch,
                micro_batch=config.micro_batch,
                view=view or config.view,
                order=order,
                epochs=None if order == "shuffle" else 1,  # a training run counts steps, not epochs
                seed=seed,
                block_size=config.block_size if order == "shuffle" else 1,
                damage_log=run / "damaged.jsonl",
                rank=rank_info.rank if divided else 0,
                world_size=rank_info.world_size if divided else 1,
                shares=shares,
                deadline=config.deadline,
                storage_options=_options(config),
                cache=config.cache,
                cache_bytes=config.cache_bytes,
                image_size=image_size,
                masks=config.masks,
                strategy=config.strategy,
                flip=config.flip if order == "shuffle" else 0.0,
                min_pixels=config.min_pixels if order == "shuffle" else 0,
                min_pixels_size=target_size,
                text=config.texts(),
            )
        except ColumnError as error:
            raise UsageError(f"--data.text: {error}") from None
        except ValueError as error:
            raise with_flags(error) from None
        except (ManifestError, MissingError) as error:
            flag = "--data.view" if view is None else "--evaluation.view"
            raise UsageError(f"{flag if self._opens(config) else '--data.root'}: {error}") from None
        # The lines of earlier starts count, too. Undivided, each rank finds the damage by itself.
        self.stream.damage_log = DamageLog(run / "damaged.jsonl", rank_info.rank)
        if config.decode == "gpu" and rank_info.device.type == "cpu":
            raise UsageError("--data.decode gpu: this run is on the CPU; drop the flag")
        try:
            self.loader = Loader(
                self.stream,
                threads=config.threads,
                prefetch=config.prefetch,
                device=rank_info.device,
                dense=target_size,
                decode=config.decode,
                quiet=True,
            )
        except ValueError as error:
            raise with_flags(error) from None
        self.micro_batches = self.stream.plan.count
        self._batches: Generator[Batch, None, None] | None = None
        self._peeked: tuple[dict[str, Any], Batch] | None = None  # the state before this step

    @staticmethod
    def _opens(config: DataConfig) -> bool:
        """Whether the dataset opens without the view. If it does, an error was caused by the view."""
        try:
            Dataset(config.root, deadline=config.deadline, storage_options=_options(config))
        except Sa1bError:
            return False
        return True

    def step(self) -> Iterator[Batch]:
        """The next step's `micro_batches` batches; none if a sequential feed has ended.

        Every rank has the same number. Batches may be empty.
        """
        for _ in range(self.micro_batches):
            batch = self._next()
            if batch is None:
                return
            yield batch

    def peek(self) -> Batch:
        """The first batch of the next step, without taking it: `step` returns it again.

        Raises:
            EOFError: a sequential feed has ended.
        """
        if self._peeked is None:
            state, batch = self.loader.state_dict(), self._next()
            if batch is None:
                raise EOFError("there is no next step")
            self._peeked = (state, batch)
        return self._peeked[1]

    def _next(self) -> Batch | None:
        if self._peeked is not None:
            (_, batch), self._peeked = self._peeked, None
            return batch
        self._batches = self._batches or iter(self.loader)
        return next(self._batches, None)

    def reading(self) -> str | None:
        """The sample that the next incomplete batch waits for; see `sa1b.stream.loader.Loader.reading`."""
        return self.loader.reading()

    def steps(self) -> Iterator[list[Batch]]:
        """Steps until a sequential feed ends."""
        return iter(lambda: list(self.step()), [])

    def state_dict(self) -> dict[str, Any]:
        """The state after the last step whose micro-batches were all taken."""
        return self.loader.state_dict() if self._peeked is None else self._peeked[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state. Raises sa1b.stream.resume.ResumeError."""
        self.close()
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Stop the loader's threads."""
        batches, self._batches, self._peeked = self._batches, None, None
        if batches is not None:
            batches.close()


def _options(config: DataConfig) -> dict[str, Any] | None:
    return endpoint_options(str(config.root), config.endpoint) or None
