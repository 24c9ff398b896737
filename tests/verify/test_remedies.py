"""The commands that a report advises repair what it found, typed as they are."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sa1b.shards import manifest
from tests.verify.checking import check, content, flip

REPOSITORY = Path(__file__).parents[2]

DAMAGES = {
    "shard": lambda root: flip(root / "sa1b-000002-0000.tar", 3000),
    "shard_missing": lambda root: (root / "sa1b-000002-0000.tar").unlink(),
    "index": lambda root: flip(root / "sa1b-000002-0000.parquet", 500),
    "index_missing": lambda root: (root / "sa1b-000002-0000.parquet").unlink(),
    "task": lambda root: flip(root / "tasks" / "sa_000002.json", 200),
    "task_missing": lambda root: (root / "tasks" / "sa_000002.json").unlink(),
    "rows": lambda root: flip(root / "tasks" / "sa_000002.samples", 200),
    "table": lambda root: flip(root / manifest.table_name(root), 200),
    "table_missing": lambda root: (root / manifest.table_name(root)).unlink(),
    "dataset": lambda root: (root / "dataset.json").write_text("{"),
    "dataset_missing": lambda root: (root / "dataset.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["keep_json", "image_size"])
def test_the_advice_repairs(roots, sources, tmp_path, name, damage):
    root = shutil.copytree(roots[name], tmp_path / "root with a space")
    written = content(root)
    DAMAGES[damage](root)
    report = check(root)
    assert report.findings
    for remedy in report.found.remedies():
        (command,) = re.findall("`([^`]+)`", remedy)
        command = command.replace("<sa_000002.tar>", str(sources[1])).replace("python ", f"{sys.executable} ")
        done = subprocess.run(
            command, shell=True, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
    after = check(root, deep=True)
    assert (after.findings, after.notes) == ([], [])
    assert content(root) == written
