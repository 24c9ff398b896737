"""A Chrome trace of some steps of a run."""

import errno
import os
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from sa1b.engine.control import Control
from sa1b.engine.ranks import RankInfo


class ChromeTrace:
    """Records the steps `first` to `last` and writes RUN/trace-<rank>.json after the last one.

    Args:
        steps: first and last step, counted from 0; None: nothing is recorded.
    """

    def __init__(
        self, steps: tuple[int, int] | None, run: Path, rank_info: RankInfo, control: Control
    ) -> None:
        self.path = run / f"trace-{rank_info.rank}.json"
        self._steps = steps
        self._control = control
        self._on_gpu = rank_info.device.type == "cuda"
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Call this before each step."""
        if self._steps is not None and self._profile is None and self._steps[0] <= step <= self._steps[1]:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int) -> None:
        """Call this after each step."""
        if self._profile is not None and self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write the steps recorded so far."""
        if self._profile is None:
            return
        self._profile.stop()
        with self._control.writing():
            try:
                self._profile.export_chrome_trace(str(self.path))
            except RuntimeError as error:
                raise OSError(errno.EIO, str(error), str(self.path)) from error
            if not _ends_as_json(self.path):  # torch's writer does not report failed writes
                raise OSError(errno.EIO, "the trace was not written completely", str(self.path))
        self._profile, self._steps = None, None


def _ends_as_json(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        file.seek(-min(64, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip().endswith(b"}")
