"""A check, and the process that runs it."""

import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sa1b.programs.doctor.report import Finding
from sa1b.stream.plan import process_rank

ABORTED = "aborted"  # in the values of a finding: the check did not end, or ended by an error


@dataclass(frozen=True, slots=True)
class RankProcess:
    """This process, its rank, and the settings of the user.

    Attributes:
        seconds: duration of each measurement of a rate.
        timeout: seconds that a rank waits for the others.
        largest_message: bytes of the largest message of the bandwidth sweep.
        rate: images per second that a rank trains; None: estimated from its device.
        device: of this rank; a GPU has an index.
        system: folder in which /sys, /proc, /etc and /dev are mounted.
    """

    root: str | None = None
    out: Path | None = None
    seconds: float = 5.0
    timeout: float = 60.0
    largest_message: int = 256 << 20
    rate: float | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    host: str = field(default_factory=socket.gethostname)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    system: Path = Path("/")

    @property
    def deadline(self) -> float:
        """Seconds in which storage must answer; shorter than `wait`."""
        return self.timeout / 2

    @property
    def limit(self) -> float:
        """Seconds after which a check of this rank counts as hanging."""
        return self.deadline + 4 * self.seconds

    @property
    def wait(self) -> float:
        """Seconds that a rank waits for another one, in which a check may hang."""
        return max(self.timeout, 1.2 * self.limit)

    @classmethod
    def of_this_process(cls, **settings: Any) -> "RankProcess":
        """This process, by the variables of torchrun; ValueError if they contradict each other."""
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            value = os.environ.get(name, "0")
            if not value.isdecimal():
                raise ValueError(f"{name}={value}: must be a whole number; torchrun sets it")
        rank, world_size = process_rank()
        local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an old driver, which is a finding of the check of devices
            visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # A launcher may show each task its own GPU only, as number 0 (srun --gpus-per-task=1).
        index = 0 if visible == 1 else local_rank
        device = torch.device("cuda", index) if index < visible else torch.device("cpu")
        return cls(
            **settings,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            device=device,
        )


@dataclass(frozen=True, slots=True)
class Check:
    """A check by one rank alone.

    Attributes:
        work: checks a process; a finding without ranks and host gets those of the process.
        needs: names of checks; if one of them failed, this check is skipped.
        measures: takes several seconds, which is announced.
    """

    name: str
    work: Callable[[RankProcess], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    measures: bool = False

    def run(self, process: RankProcess, before: Iterable[Finding] = ()) -> list[Finding]:
        """The findings of this rank. An error of the check itself is a finding too.

        The check runs in a separate thread, because a read of a dead file server or a call of a broken
        driver may never return. Such a check is a finding as well, and its thread keeps running.
        """
        if skipped := missing_need(self.name, self.needs, before):
            return [skipped]
        return in_thread(self.name, lambda: self.work(process), process.limit)


def in_thread(check: str, work: Callable[[], Iterable[Finding]], limit: float) -> list[Finding]:
    """The findings of a check; an error or more than `limit` seconds is a finding too."""
    findings: list[Finding] = []

    def run() -> None:
        try:
            findings.extend(work())
        except Exception as error:
            findings.append(crashed(check, error))

    thread = threading.Thread(target=run, name=check, daemon=True)
    thread.start()
    thread.join(limit)
    return [*findings, *([hung(check, limit)] if thread.is_alive() else [])]


def missing_need(check: str, needs: tuple[str, ...], before: Iterable[Finding]) -> Finding | None:
    """The finding that a check is skipped because one that it needs has failed; None if none has."""
    failed = next(
        (finding.check for finding in before if finding.check in needs and finding.state == "failed"), None
    )
    if failed is None:
        return None
    return Finding(check, "skipped", f"the check {failed!r} failed", "Fix that first")


def hung(check: str, seconds: float) -> Finding:
    return Finding(
        check,
        "failed",
        f"did not end within {seconds:g} s",
        "A file system, a store or a driver does not answer: look at `df`, `mount` and `dmesg`",
        values={ABORTED: True},
    )


def crashed(check: str, error: Exception) -> Finding:
    return Finding(
        check,
        "failed",
        f"the check ended by {type(error).__name__}: {error}".splitlines()[0],
        "Report this with the output of --json; the other checks are not affected",
        values={ABORTED: True},
    )
