"""A trace of chosen steps: every operator and kernel on a time line, for Perfetto or chrome://tracing."""

from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from sa1b.engine.place import Place


class ChromeTrace:
    """Records the steps `first` to `last` and writes RUN/trace-<rank>.json behind the last one.

    Args:
        steps: first and last step, counted from 0; None: nothing is recorded.
    """

    def __init__(self, steps: tuple[int, int] | None, run: Path, place: Place) -> None:
        self.path = run / f"trace-{place.rank}.json"
        self._steps = steps
        self._on_gpu = place.device.type == "cuda"
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """To be called before each step."""
        if self._steps is not None and self._profile is None and self._steps[0] <= step <= self._steps[1]:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int) -> None:
        """To be called behind each step."""
        if self._profile is not None and self._steps is not None and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Write what was recorded so far."""
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self.path))
            self._profile, self._steps = None, None
