"""The training command in the test's own process, for which a step of this model takes milliseconds."""

import io
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch

import sa1b
import sa1b.train
from sa1b.engine.watch.loggers import Callback
from tests.kit import Done
from tests.shards.tiny_source import pairs, write_source

MODEL = (
    *("--preset", "tiny", "--model.image-size", "64", "--model.width", "32", "--model.depth", "2"),
    *("--model.heads", "2", "--model.global-blocks", "1", "--model.window", "2", "--model.channels", "32"),
    *("--model.pixel-features", "8"),
)
SAM = (
    *MODEL,
    *(
        "--data.global-batch",
        "2",
        "--data.masks",
        "4",
        "--data.threads",
        "1",
        "--logging.tensorboard",
        "False",
    ),
    *("--optim.warmup", "1"),
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def make_root(folder: Path, images: int = 12) -> Path:
    """A directory of images of 64 x 48 pixels with some masks each, ids from 100 on."""
    tar = write_source(folder / "sa_000001.tar", pairs(range(100, 100 + images)))
    sa1b.reshard([tar], folder / "root", images_per_shard=5, workers=1, quiet=True)
    return folder / "root"


@contextmanager
def _undone() -> Iterator[None]:
    """What the command sets for its process is as before at the end."""
    handlers, threads = {number: signal.getsignal(number) for number in _SIGNALS}, torch.get_num_threads()
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32


def train(*words: object, code: int | None = 0, callbacks: Sequence[Callback] = ()) -> Done:
    """`sa1b train WORDS`; `code` is the exit code that it must have, None any."""
    out, err = io.StringIO(), io.StringIO()
    with _undone(), redirect_stdout(out), redirect_stderr(err):
        ended = sa1b.train.main(arguments=[str(word) for word in words], callbacks=callbacks)
    done = Done(ended, out.getvalue(), err.getvalue())
    assert code in (None, ended), f"{words} ended with {ended}\n{done.out}{done.err}"
    return done
