"""Compiled kernels: the contents and location of the cache; a damaged or missing cache has no effect."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sa1b import kernel
from tests.processes import REPOSITORY, Process

PACKAGE = Path(kernel.__file__).parent
WORK = "import numpy; from sa1b import hashing; print(hashing.random_words(1, 2, numpy.arange(3)).tolist())"
STATS = "; print(sum(hashing._mix_one.stats.cache_hits.values()))"

# A forked process has numba, and none of our modules: it imports them, and finds or compiles their kernels, anew.
ANEW = "import sys\nfor name in [*sys.modules]:\n    if name.split('.')[0] == 'sa1b': del sys.modules[name]\n"


def environment_of(cache: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return kept | {"XDG_CACHE_HOME": str(cache), **more}


def start(code: str, cache: Path, **more: str) -> Process:
    command = [sys.executable, "-c", ANEW + code]
    return Process(
        command, stdout=subprocess.PIPE, env=environment_of(cache, **more), cwd=REPOSITORY, text=True
    )


def run(code: str, cache: Path, **more: str) -> list[str]:
    process = start(code, cache, **more)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return output.split("\n")[:-1]


def cached(folder: Path) -> set[Path]:
    return {*folder.rglob("*.nbi"), *folder.rglob("*.nbc")}


def test_kernels_are_cached_for_the_user_and_never_in_the_package(tmp_path: Path) -> None:
    before = cached(PACKAGE)
    words, hits = run(WORK + STATS, tmp_path)
    assert hits == "0"
    (folder,) = (tmp_path / "sa1b" / "kernels").iterdir()
    assert folder.name == kernel.source_digest(PACKAGE)[:16]
    assert cached(tmp_path) == cached(folder) != set()
    assert cached(PACKAGE) == before
    assert run(WORK + STATS, tmp_path) == [words, "1"]
    command, environment = [sys.executable, "-c", WORK + STATS], environment_of(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == [words, "1"]  # a new interpreter


def test_a_damaged_cache_is_no_error_and_is_made_again(tmp_path: Path) -> None:
    (words,) = run(WORK, tmp_path)
    for pattern in ("*.nbc", "*.nbi"):
        for path in tmp_path.rglob(pattern):
            path.write_bytes(path.read_bytes()[:20])
        assert run(WORK, tmp_path) == [words]
        if pattern == "*.nbi":
            run(WORK, tmp_path)  # the first process has only removed a damaged index
        assert run(WORK + STATS, tmp_path) == [words, "1"]


def test_without_a_folder_that_can_be_written_kernels_compile_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = cached(PACKAGE)
    assert run(WORK + STATS, tmp_path / "file")[1] == "0"
    code = "from sa1b import kernel; assert kernel.cache_folder() is None; " + WORK
    assert run(code, tmp_path / "file", HOME=str(tmp_path / "file"))
    assert cached(PACKAGE) == before


def test_two_processes_fill_the_cache_at_the_same_time(tmp_path: Path) -> None:
    both = [start(WORK, tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in both]
    assert outputs[0] == outputs[1] != ""
    assert [process.returncode for process in both] == [0, 0]
    assert run(WORK + STATS, tmp_path)[1] == "1"


def test_other_source_has_another_folder(tmp_path: Path) -> None:
    package = shutil.copytree(PACKAGE, tmp_path / "sa1b", ignore=shutil.ignore_patterns("__pycache__"))
    assert kernel.source_digest(package) == kernel.source_digest(PACKAGE)
    with (package / "masks" / "pixel_kernels.py").open("a") as file:
        file.write("# changed\n")
    assert kernel.source_digest(package) != kernel.source_digest(PACKAGE)


def test_the_digest_covers_all_kernels_and_what_they_import() -> None:
    covered = {path for pattern in kernel.SOURCES for path in PACKAGE.glob(pattern)}
    with_kernels = {path for path in PACKAGE.rglob("*.py") if "\n@kernel\n" in path.read_text()}
    assert with_kernels
    assert with_kernels <= covered
    names = {".".join(("sa1b", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in covered}
    for path in covered:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sa1b"):
                assert node.module in names, path


def test_functions_of_the_user_are_cached_where_numba_puts_them(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import numba\n@numba.njit(cache=True)\ndef double(x):\n    return 2 * x\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {WORK}; import own; own.double(4)"
    run(code, tmp_path / "cache")
    assert cached(tmp_path / "__pycache__")
    assert not [path for path in cached(tmp_path / "cache") if path.name.startswith("own")]
