"""Summaries of the last steps on rank 0: times of the ranks, and the limiting stages of their loaders.

Each window of `--logging.window` steps adds two lines to RUN/metrics.jsonl, {"step": ..., "ranks": ...} and
{"step": ..., "loader": ...}. A slow rank and a loader that limits the run are printed. SIGUSR2 to any rank
prints the table of the ranks after the current step. The numbers of all ranks are part of the exchange of
each step, so this module needs no collective.
"""

from collections.abc import Mapping, Sequence

from sa1b.engine.data_wait import LoaderSettings, LoaderWindow
from sa1b.engine.metrics import Metrics
from sa1b.engine.stragglers import Stragglers


class Window:
    """The last steps of all ranks.

    Args:
        hosts: machine of each rank.
        size: steps of a window.
        separable, shares, divided: see `sa1b.engine.stragglers.Stragglers`.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        size: int,
        metrics: Metrics,
        loader: LoaderSettings,
        *,
        separable: bool,
        shares: Sequence[int] | None = None,
        divided: bool = True,
    ) -> None:
        self._stragglers = Stragglers(hosts, size, separable=separable, shares=shares, divided=divided)
        self._loader = LoaderWindow(loader)
        self._metrics = metrics

    def add(self, step: int, ranks: Mapping[str, Sequence[float]], *, asked: bool) -> None:
        """Add the numbers of a step, see `sa1b.engine.run.Run.numbers`.

        Args:
            step: completed steps.
            ranks: numbers by name, one of each rank.
            asked: whether the table of the ranks is printed.
        """
        before = self._stragglers.count
        complete = self._stragglers.add(ranks)
        if self._stragglers.count == before:
            self._loader.start(ranks)  # no step of the first window yet
        if (complete or asked) and self._stragglers.steps:
            self._metrics.window(step, "ranks", self._stragglers.document())
        if asked:
            self._metrics.say(self._stragglers.table())
        if not complete:
            return
        for slow in self._stragglers.judge():
            self._metrics.say(slow.message())
        line, message = self._loader.end(ranks, self._stragglers.waits())
        self._metrics.window(step, "loader", line)
        if message is not None:
            self._metrics.say(message)
