"""The command `sa1b`: its tour, its verbs, and the modules that each of them imports."""

import inspect
import itertools
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest

import sa1b
from sa1b.verbs import in_order, module_of
from tests import processes

VERBS = [verb for verb in in_order() if " " not in verb]
SUBVERBS = [verb for verb in in_order() if " " in verb]

REPOSITORY = Path(__file__).parents[2]
HEAVY = {"numpy", "numba", "pyarrow", "torch", "cv2", "fsspec", "tqdm", "PIL"}
LIGHT_VERBS = sorted(
    set(VERBS) - {"train"}
)  # the flags of train are its settings, whose modules import torch


@cache
def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in a new interpreter; the same arguments give the same result again."""
    command = [sys.executable, "-X", "importtime", "-m", "sa1b", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def imported(done: "subprocess.CompletedProcess[str]") -> set[str]:
    """Top-level modules in the output of -X importtime."""
    return {
        name.split(".")[0] for name in re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)
    }


def printed(done: "subprocess.CompletedProcess[str]") -> list[str]:
    return [line for line in done.stderr.splitlines() if not line.startswith("import time:")]


def test_the_tour_fits_on_a_screen_and_names_every_verb_with_an_example() -> None:
    done = run("--help")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert re.findall(r"^  ([a-z]+)  ", done.stdout, re.MULTILINE) == list(VERBS)
    assert re.findall(r"^  \w+  .*  sa1b (\w+) ", done.stdout, re.MULTILINE) == list(VERBS)
    assert not imported(done) & {*HEAVY, "tyro"}


def test_without_arguments_the_tour_goes_to_stderr_and_is_no_success() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: sa1b VERB" in done.stderr


def test_the_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"sa1b {sa1b.__version__}\n")


@pytest.mark.parametrize(
    ("word", "advice"),
    [("verfy", "sa1b verify`?"), ("nonsense", "sa1b --help`"), ("--verify", "sa1b verify")],
)
def test_an_unknown_verb_is_refused_with_the_nearest_one(word: str, advice: str) -> None:
    done = run(word)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = printed(done)
    assert line.startswith(f"error: {word}: ")
    assert advice in line


def early_breaks(shown: str) -> list[str]:
    """Lines in the boxes of a help that end although the next word of their text fits."""
    rows = [row[2:-2] for row in shown.splitlines() if row.startswith("│")]
    found = []
    for row, following in itertools.pairwise(rows):
        word = re.match(r" {6,}(\S+)", following)  # the text of a flag goes on
        only_a_flag = not row.startswith(" ") and "  " not in row.rstrip()
        if word and not only_a_flag and len(row.rstrip()) + 1 + len(word[1]) <= len(row):
            found.append(row)
    return found


@pytest.mark.parametrize("verb", [*LIGHT_VERBS, *SUBVERBS])
def test_help_teaches_and_imports_nothing_that_takes_long(verb: str) -> None:
    done = run(*verb.split(), "--help")
    assert done.returncode == 0
    assert re.search(rf"^usage: .*sa1b {verb} ", done.stdout)
    assert f"Example: sa1b {verb} " in done.stdout
    options = re.findall(r"^│ (--[a-z0-9-]+)", done.stdout, re.MULTILINE)
    assert options
    assert len(options) == len(set(options))
    assert "{None}" not in done.stdout
    assert "None)" not in done.stdout
    assert not early_breaks(done.stdout)
    assert "sa1b" in imported(done)
    assert not imported(done) & HEAVY


@pytest.mark.parametrize("verb", [*LIGHT_VERBS, *SUBVERBS])
def test_every_argument_has_a_help_text_of_its_own(verb: str) -> None:
    main = module_of(verb).main
    explained = inspect.cleandoc(main.__doc__ or "").partition("Args:\n")[2]
    elsewhere = {  # the text of a flag of several commands is in its type
        name
        for name, hint in get_type_hints(main, include_extras=True).items()
        if any(getattr(note, "help", None) for note in getattr(hint, "__metadata__", ()))
    }
    parameters = [name for name in inspect.signature(main).parameters if name not in elsewhere]
    assert re.findall(r"^    (\w+): ", explained, re.MULTILINE) == parameters


def test_help_shows_no_empty_default_and_no_two_empty_lines() -> None:
    train = [sys.executable, "-m", "sa1b", "train", "--help"]
    for done in (run("reshard", "--help"), processes.run(train, capture_output=True, text=True)):
        shown = done.stdout
        assert "--help" in shown
        assert "(default: )" not in shown
        assert "\n\n\n" not in shown
        assert not early_breaks(shown)


def test_the_script_of_a_clone_is_the_same_command() -> None:
    script = [sys.executable, "tools/reshard.py", "--help"]
    done = subprocess.run(script, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == run("reshard", "--help").stdout


def test_source_tars_are_not_written_into_a_dataset_directory(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}")
    done = run("synthesize", str(tmp_path))
    assert done.returncode == 2
    assert printed(done) == [f"error: {tmp_path}: a dataset directory; name another folder for source tars"]
