"""The end of a run says how to enable the tests that were skipped."""

import sys
from pathlib import Path

import pytest

from tests import processes, skipped


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("no Chromium here", "1 Chromium: install chromium"),
        ("no radosgw, ceph-mon: apt-get install radosgw", "1 radosgw: apt-get install"),
        ("no azurite-blob: npm install -g azurite", "1 azurite-blob: npm install -g azurite"),
        ("could not import 'gcsfs': No module named 'gcsfs'", "1 'gcsfs': pip install -e '.[gcs]'"),
        ("no real samples in /somewhere", "1 real samples: set SA1B_REAL_SAMPLES to"),
        ("Skipped: no CUDA device", "1 no CUDA device: on a machine with a GPU"),
    ],
)
def test_each_kind_has_its_advice(reason: str, advice: str) -> None:
    (line,) = skipped.lines([reason])
    assert advice in line


def test_a_kind_is_counted_and_the_rest_needs_no_line() -> None:
    lines = skipped.lines(
        ["no CUDA device", "no CUDA device", "there is a GPU", "names are as they are in a URL"]
    )
    assert [line.split(": ")[:2] for line in lines] == [["skipped, need another machine", "2 no CUDA device"]]


def test_all_kinds_together_have_three_lines() -> None:
    kinds = [kind for ways in skipped.WAYS.values() for kind in ways]
    lines = skipped.lines(kinds)
    assert len(lines) == 3
    assert all(any(f"1 {kind}: " in line for line in lines) for kind in kinds)


def test_a_run_prints_the_lines(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_it():\n    pytest.skip('no Chromium here')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", f"--rootdir={tmp_path}", tmp_path]
    done = processes.run(command, capture_output=True, text=True, cwd=processes.REPOSITORY)
    assert "1 Chromium: install chromium" in done.stdout, done.stderr
