"""The lines at the end of a run that say how to enable the tests that were skipped."""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.cluster import slurm_node
from tests.storage import azurite, ceph, gcs

# What a skipped test needs -> part of the reason for the skip -> how to enable the test.
WAYS = {
    "a package": {"'gcsfs'": "pip install -e '.[gcs]'", "'adlfs'": "pip install -e '.[azure]'"},
    "a program": {
        "Chromium": "install chromium, chromium-browser or google-chrome",
        "radosgw": ceph.INSTALL,
        azurite.PROGRAM: azurite.INSTALL,
        gcs.PROGRAM: gcs.INSTALL,
        "shellcheck": "apt-get install shellcheck",
        "SLURM": slurm_node.INSTALL + " (and run as root)",
        "C compiler": "install a C compiler (cc)",
        "GNU tar": "install GNU tar",
        "not installed": "pip install -e '.[dev]'",
    },
    "another machine": {
        "SA1B_SAM2_SOURCES": "set SA1B_SAM2_SOURCES to a checkout of SAM 2's sources",
        "real samples": "set SA1B_REAL_SAMPLES to a folder with sa_*.jpg and sa_*.json of SA-1B",
        "no CUDA device": "on a machine with a GPU and a CUDA build of torch, pytest -m gpu",
        "needs root": "run as root, in a container for example",
        "mount": "run as root where file systems can be mounted",
    },
}


def lines(reasons: Iterable[str]) -> list[str]:
    """At most a line for each need: how many tests were skipped for it, and how to enable them."""
    kinds = [kind for ways in WAYS.values() for kind in ways]
    counts = Counter(next((kind for kind in kinds if kind.lower() in text.lower()), None) for text in reasons)
    found = []
    for need, ways in WAYS.items():
        parts = [f"{counts[kind]} {kind}: {way}" for kind, way in ways.items() if counts[kind]]
        if parts:
            found.append(f"skipped, need {need}: " + "; ".join(parts))
    return found


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason why a test was skipped."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
