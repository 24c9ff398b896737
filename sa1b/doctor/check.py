"""A check, and the process that it examines."""

import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sa1b.doctor.report import Finding
from sa1b.stream.plan import process_rank

ABORTED = "aborted"  # in the values of a finding: the check did not end, or ended by an error


@dataclass(frozen=True, slots=True)
class Subject:
    """This process, its rank, and the settings of the user.

    Attributes:
        root: dataset directory, a folder or a URL; None: not given.
        out: folder in which a run would write; None: not given.
        seconds: duration of each measurement of a rate.
        rate: images per second that a rank trains; None: estimated from its device.
        timeout: seconds that a rank waits for the others.
        largest_message: bytes of the largest message of the bandwidth sweep.
        local_rank, local_world_size: rank on this machine, and number of ranks on it.
        device: of this rank; a GPU has an index.
        host: name of this machine.
        environment: variables of this process.
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
    def of_this_process(cls, **given: Any) -> "Subject":
        """This process, as the variables of torchrun describe it, with all other attributes from `given`.

        Raises:
            ValueError: the variables contradict each other.
        """
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
            **given,
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
        name: as in the table and in the documentation.
        work: examines a process; a finding without ranks and host gets those of the process.
        needs: names of checks; if one of them failed, this check is skipped.
        measures: takes several seconds, which is announced.
    """

    name: str
    work: Callable[[Subject], Iterable[Finding]]
    needs: tuple[str, ...] = ()
    measures: bool = False

    def run(self, subject: Subject, before: Iterable[Finding] = ()) -> list[Finding]:
        """The findings of this rank. An error of the check itself is a finding too.

        The check runs in a separate thread, because a read of a dead file server or a call of a broken
        driver may never return. Such a check is a finding as well, and its thread keeps running.

        Args:
            before: the findings of earlier checks.
        """
        if skipped := unmet(self.name, self.needs, before):
            return [skipped]
        return in_thread(self.name, lambda: self.work(subject), subject.limit)


def in_thread(check: str, work: Callable[[], Iterable[Finding]], limit: float) -> list[Finding]:
    """The findings of a check. If it hangs or raises an error, this is a finding too.

    Args:
        limit: seconds after which it counts as hanging; its thread keeps running.
    """
    found: list[Finding] = []

    def run() -> None:
        try:
            found.extend(work())
        except Exception as error:
            found.append(crashed(check, error))

    thread = threading.Thread(target=run, name=check, daemon=True)
    thread.start()
    thread.join(limit)
    return [*found, *([hung(check, limit)] if thread.is_alive() else [])]


def unmet(check: str, needs: tuple[str, ...], before: Iterable[Finding]) -> Finding | None:
    """The finding that a check is skipped because one that it needs has failed; None if none has.

    Args:
        before: the findings of earlier checks.
    """
    failed = next((one.check for one in before if one.check in needs and one.state == "failed"), None)
    if failed is None:
        return None
    return Finding(check, "skipped", f"the check {failed!r} failed", "Fix that first")


def hung(check: str, seconds: float) -> Finding:
    """The finding that a check did not end."""
    return Finding(
        check,
        "failed",
        f"did not end within {seconds:g} s",
        "A file system, a store or a driver does not answer: look at `df`, `mount` and `dmesg`",
        values={ABORTED: True},
    )


def crashed(check: str, error: Exception) -> Finding:
    """The finding that a check ended by an unexpected error, so that the other checks continue."""
    return Finding(
        check,
        "failed",
        f"the check ended by {type(error).__name__}: {error}".splitlines()[0],
        "Report this with the output of --json; the other checks are not affected",
        values={ABORTED: True},
    )
