"""The line at the end of a run that says how to enable the tests that were skipped."""

from collections.abc import Iterable

import pytest

from tests.cluster import slurm_node
from tests.storage import azurite, ceph, gcs

# Part of the reason for the skip -> how to enable the test.
WAYS = {
    "Chromium": "install chromium, chromium-browser or google-chrome",
    "radosgw": ceph.INSTALL,
    azurite.PROGRAM: azurite.INSTALL,
    gcs.PROGRAM: gcs.INSTALL,
    "'gcsfs'": "pip install -e '.[gcs]'",
    "'adlfs'": "pip install -e '.[azure]'",
    "SLURM": slurm_node.INSTALL + " (and run as root)",
    "real samples": "set SA1B_REAL_SAMPLES to a folder with sa_*.jpg and sa_*.json of SA-1B",
    "no CUDA device": "on a machine with a GPU and a CUDA build of torch, pytest -m gpu",
    "needs root": "run as root, in a container for example",
    "mount": "run as root where file systems can be mounted",
    "C compiler": "install a C compiler (cc)",
    "GNU tar": "install GNU tar",
    "not installed": "pip install -e '.[dev]'",
}


def lines(reasons: Iterable[str]) -> list[str]:
    """A line for each way to enable skipped tests, with their number."""
    counts: dict[str, tuple[int, str]] = {}
    for reason in reasons:
        name = next((part for part in WAYS if part.lower() in reason.lower()), None)
        if name is not None:
            count, kind = counts.get(WAYS[name], (0, name))
            counts[WAYS[name]] = (count + 1, kind)
    return [f"{count} skipped ({kind}): to run them, {way}" for way, (count, kind) in counts.items()]


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason why a test was skipped."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
