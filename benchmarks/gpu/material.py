"""The datasets of the other parts: synthetic images of full size, and the same re-encoded at 1024 pixels.

Each part opens them with `roots`. The images are those of `sa1b synthesize`, with the statistics of SA-1B.
"""

import time
from pathlib import Path

import sa1b
from benchmarks.gpu.part import Record, Setting
from sa1b.workers import available_cpus

KINDS = ("original", "1024")
PHRASES = "phrases.parquet"


def roots(setting: Setting) -> dict[str, Path]:
    """The dataset directories by the size of their JPEGs, "original" and "1024"."""
    return {kind: setting.folder / kind for kind in KINDS}


def phrases(setting: Setting) -> Path:
    """The table of phrases of the images."""
    return setting.folder / "source" / PHRASES


def work(setting: Setting, record: Record) -> None:
    """Make the datasets with the commands that a user has."""
    workers = setting.pick(min(available_cpus(), 16), 1)
    images, side = setting.pick((6, []), (4, ["--long-side", "160"]))
    source, found = setting.folder / "source", roots(setting)
    sizes = ("--tars", workers, "--images-per-tar", images, *side)
    sizes += ("--plain", "--phrases", "--workers", workers)
    if not source.exists():  # else of an earlier run in this folder
        timed(setting, record, "synthesize", "synthesize", source, *sizes)
    smaller = ["--image-size", setting.pick(1024, 64)]
    for kind, flags in (("original", []), ("1024", smaller)):
        command = ("reshard", source, "--out", found[kind], "--ignore", PHRASES, "--workers", workers, *flags)
        timed(setting, record, f"reshard {kind}", *command)
        record.check(f"{kind}: all images", len(sa1b.open(found[kind])) == workers * images, found[kind])
    record.figure("images of a dataset", workers * images)


def timed(setting: Setting, record: Record, name: str, *command: object) -> None:
    """Run a command of the package and record how long it took; its output goes to the log."""
    began = time.perf_counter()
    done = setting.run(name, "-m", "sa1b", *command)
    if done.returncode:
        raise ChildProcessError(f"{name}: exit code {done.returncode}: {done.stdout.strip()[-300:]}")
    record.figure(name, time.perf_counter() - began, "s")
