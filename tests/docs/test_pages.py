"""Every command and snippet of README.md and docs/*.md runs as shown.

The fenced blocks of a page whose language is `bash`, `python` or `sql` are run in order, in one temporary folder
for each page. The folder is empty but for the materials that the page names, see below; a page makes the rest by
its own commands. Other languages (`text` for output, `json`, `yaml`, ...) and blocks without one are not run.
A `text` block directly after a block that is run must be what that block prints, on stdout and stderr together;
`...` in it stands for text that is left out. `difference` in `tests/docs/output.py` has the exact rules.

- `bash`: a shell that stops at the first command that fails. `sa1b` and `python` are those of this checkout.
  `cd` and variables have no effect on later blocks. Commands run as printed: where a page must be quick, it
  shows the flags that make it quick.
- `python`: the blocks of a page share one namespace and one process. They need no `if __name__ ==
    "__main__"`.
- `sql`: DuckDB, in the page's folder.

HTML comments, which are invisible on the page, change these rules:

- `<!-- with: shards, run -->` anywhere in the page: these materials are copied into the folder before the
  first block. `downloads`: two source tars, `sa_000020.tar` (images 223750 to 223757) and `sa_000021.tar` (images
  234940 to 234947), longer side 256 pixels. `shards`: the dataset directory of `downloads`. `run`: a finished
  training run on it.
  `photo.jpg`. `captions.parquet`: columns image_id and caption, without a row for the last image.
  `sam_vit_b_01ec64.pth`: weights of the published sizes, all zero. For a further material, add
  a function to `materials.py`.
- `<!-- not run: REASON -->` on the line before a block: it cannot run on a test machine. The flags of its
  `sa1b VERB` and `-m sa1b.train` are still parsed, its Python is still compiled.
- `<!-- dry run: REASON -->` on the line before a `bash` block: training would take minutes or GPUs. `sa1b train`
  gets the flag `--dry-run`, and the output is not compared.
- `<!-- numbers vary: REASON -->` on the line before a `text` block: its words are compared, its numbers are not.
- `<!-- not compared: REASON -->` on the line before a `text` block: it is not compared.
- `<!-- exit code: 3 -->` on the line before a `bash` block: the block exits with this code.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes
from tests.docs import materials
from tests.docs.blocks import LANGUAGES, PAGES, blocks_of, materials_of
from tests.docs.command import write_commands


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the materials of all pages."""
    return tmp_path_factory.mktemp("materials")


@pytest.fixture(scope="session")
def commands() -> Iterator[Path]:
    """A folder with the commands `sa1b` and `python`."""
    with tempfile.TemporaryDirectory() as name:
        write_commands(Path(name) / "bin")
        yield Path(name) / "bin"


def run_page(page: Path, folder: Path, made: Path, commands: Path) -> subprocess.CompletedProcess[str]:
    """Run the blocks of a page in a folder, with the materials that it names."""
    for name in materials_of(page.read_text(encoding="utf-8")):
        materials.copy_to(folder, name, made)
    return processes.run(
        [sys.executable, "-c", f"from tests.docs import page; page.main({str(page)!r})"],
        cwd=folder,
        env={**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', os.defpath)}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_runs_as_shown(page: Path, tmp_path: Path, made: Path, commands: Path) -> None:
    if any(block.language in LANGUAGES for block in blocks_of(page.read_text(encoding="utf-8"))):
        done = run_page(page, tmp_path, made, commands)
        assert done.returncode == 0, done.stdout


def written(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_blocks_share_the_folder_and_python_blocks_the_namespace(
    tmp_path: Path, made: Path, commands: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    page = written(
        tmp_path,
        """\
<!-- with: shards, downloads -->
```bash
ls downloads > names.txt
```
```python
names = open("names.txt").read().split()
print(*names)
```
```text
sa_000020.tar sa_000021.tar
```

Not the output of a block:

```text
not compared
```
    ```python
    import sa1b
    assert len(sa1b.open("shards")) == 8 * len(names)
    ```
```sql
COPY (SELECT count(*) AS n FROM 'shards/*.parquet') TO 'count.csv';
```
<!-- dry run: GPUs -->
```bash
sa1b train --data.root shards --out run > plan.txt
```
<!-- exit code: 3 -->
```bash
exit 3
```
""",
    )
    done = run_page(page, folder, made, commands)
    assert done.returncode == 0, done.stdout
    assert (folder / "count.csv").read_text().split() == ["n", "16"]
    assert "peak memory" in (folder / "plan.txt").read_text()
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("```bash\nfalse\ntrue\n```", "returned non-zero exit status 1"),
        ("```python\nx = 1\nx.nonsense\n```", 'page.md", line 3'),
        ("```sql\nSELECT nonsense\n```", "nonsense"),
        ("<!-- not run: eight GPUs -->\n```bash\ntorchrun -m sa1b.train --data.rot shards\n```", "data.rot"),
        ("<!-- not run: eight GPUs -->\n```python\nx =\n```", "SyntaxError"),
        (
            "<!-- not run: GPUs -->\n```bash\nsa1b train --data.root shards --optim.steps 2 --optim.warmup 9\n```",
            "--optim.warmup 9",
        ),
        (
            "```bash\necho one\n```\n```text\ntwo\n```",
            "page.md:5: the page shows\ntwo\nthe block printed\none",
        ),
        ("```python\nprint(1)\n```\n\n```text\n2\n```", "page.md:6: the page shows\n2\n"),
    ],
)
def test_a_block_that_fails_fails_its_page(
    text: str, reason: str, tmp_path: Path, made: Path, commands: Path
) -> None:
    done = run_page(written(tmp_path, text), tmp_path, made, commands)
    assert done.returncode != 0
    assert reason in done.stdout
