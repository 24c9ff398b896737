"""The end of a run says how to enable the tests that were skipped."""

import sys
from pathlib import Path

import pytest

from tests import processes, skipped


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("no Chromium here", "1 skipped (Chromium): to run them, install chromium"),
        (
            "no radosgw, ceph-mon: apt-get install radosgw",
            "1 skipped (radosgw): to run them, apt-get install",
        ),
        (
            "no azurite-blob: npm install -g azurite",
            "1 skipped (azurite-blob): to run them, npm install -g azurite",
        ),
        (
            "could not import 'gcsfs': No module named 'gcsfs'",
            "1 skipped ('gcsfs'): to run them, pip install -e '.[gcs]'",
        ),
        ("no real samples in /somewhere", "1 skipped (real samples): to run them, set SA1B_REAL_SAMPLES to"),
        ("Skipped: no CUDA device", "1 skipped (no CUDA device): to run them, on a machine with a GPU"),
    ],
)
def test_each_kind_has_one_line(reason: str, advice: str) -> None:
    (line,) = skipped.lines([reason])
    assert line.startswith(advice)


def test_a_kind_is_counted_and_the_rest_needs_no_line() -> None:
    lines = skipped.lines(
        ["no CUDA device", "no CUDA device", "there is a GPU", "names are as they are in a URL"]
    )
    assert [line.split(":")[0] for line in lines] == ["2 skipped (no CUDA device)"]


def test_a_run_prints_the_lines(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_it():\n    pytest.skip('no Chromium here')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", f"--rootdir={tmp_path}", tmp_path]
    done = processes.run(command, capture_output=True, text=True, cwd=processes.REPOSITORY)
    assert "1 skipped (Chromium): to run them, install chromium" in done.stdout, done.stderr
