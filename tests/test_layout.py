"""Rules for every file: names, light imports, and help texts of tools."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MODULES = sorted(path for folder in ("sa1b", "tools") for path in (REPOSITORY / folder).rglob("*.py"))


def test_no_module_shares_a_name_with_the_standard_library() -> None:
    names = {path.stem for path in MODULES} | {
        path.name for path in (REPOSITORY / "sa1b").iterdir() if path.is_dir()
    }
    assert not (names - {"__init__"}) & set(sys.stdlib_module_names)


def test_contributing_says_which_tests_belong_to_which_room() -> None:
    table = (REPOSITORY / "CONTRIBUTING.md").read_text().split("## Which tests")[1].split("## Rules")[0]
    packages = {*REPOSITORY.glob("sa1b/*/__init__.py"), *REPOSITORY.glob("sa1b/programs/*/__init__.py")}
    rooms = {f"{path.parent.relative_to(REPOSITORY)}/" for path in packages} - {"sa1b/programs/"}
    tests = {f"tests/{path.parent.name}/" for path in REPOSITORY.glob("tests/*/__init__.py")}
    assert {name for name in rooms | tests if f"`{name}`" not in table} == set()
    named = set(re.findall(r"`((?:sa1b|tests|tools)/[a-z_/]*)`", table))
    assert {name for name in named if not (REPOSITORY / name).exists()} == set()


def test_each_line_of_long_tests_names_a_test() -> None:
    for line in (REPOSITORY / "tests" / "long.txt").read_text().splitlines():
        file, _, name = line.partition("[")[0].partition("::")
        text = (REPOSITORY / file).read_text()
        assert all(re.search(rf"(def|class) {part}\b", text) for part in name.split("::") if part), line


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not {path.stem for path in MODULES} & {"utils", "util", "helpers", "helper", "common", "misc"}


def test_modules_are_one_noun_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES}
    # The training command is best read in one piece.
    assert lengths.pop(REPOSITORY / "sa1b" / "train.py") <= 475
    assert {path.name: length for path, length in lengths.items() if length > 400} == {}


ENGINE = REPOSITORY / "sa1b" / "engine"
# What a step of training needs.
CORE = (
    REPOSITORY / "sa1b" / "train.py",
    *(ENGINE / "step" / f"{name}.py" for name in ("gradients", "optim", "feed")),
    *(ENGINE / "ranks" / f"{name}.py" for name in ("parallel", "rank_info")),
    *(ENGINE / f"{name}.py" for name in ("watch/control", "evaluation")),
    *(ENGINE / "checkpoint" / f"{name}.py" for name in ("checkpoints", "folder", "tensors")),
)


def test_the_core_of_training_is_short() -> None:
    assert sum(len(path.read_text().splitlines()) for path in CORE) < 3000


def imported(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code`."""
    script = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    return set(done.stdout.splitlines()[-1].split())


def test_masks_import_no_torch() -> None:
    assert not imported("import sa1b.masks") & {"torch", "pyarrow", "s3fs", "webdataset", "pycocotools"}


def test_the_package_imports_lightly_and_loads_public_names_on_use() -> None:
    assert not imported("import sa1b") & {"torch", "numpy", "pyarrow", "s3fs", "webdataset", "pycocotools"}
    assert not imported("import sa1b; sa1b.open; sa1b.Dataset") & {
        "torch",
        "pyarrow",
        "s3fs",
        "webdataset",
        "pycocotools",
    }


def test_streaming_takes_no_memory_for_what_only_ingest_needs() -> None:
    assert not imported("import sa1b; sa1b.Stream; sa1b.Loader") & {"pyarrow", "s3fs", "pycocotools", "tyro"}


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import sa1b

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sa1b.nonsense
