"""The comparison of shown output with printed output, and the steps of training that pages show."""

import re
from pathlib import Path

import pytest

from sa1b.recipes.presets import PRESETS
from tests.docs.blocks import PAGES, blocks_of, materials_of
from tests.docs.output import difference


def difference_to_example(text: str, comment: str = "") -> str | None:
    """How a text block differs from three lines of output and a progress bar."""
    ran, output = blocks_of(f"```bash\ntrue\n```\n{comment}\n```text\n{text}\n```\n")
    assert (ran.follows, output.follows) == (False, True)
    return difference(output, "images 16\n\ntrain:   0%|    | 0/2\ndigest 5a\ntook 3.2 s\n")


@pytest.mark.parametrize(
    ("text", "comment", "same"),
    [
        ("images 16\ndigest 5a\ntook 3.2 s", "", True),
        ("images 16\ndigest 5a\ntook 0.1 s", "", True),
        ("images 16\n...\ntook 3.2 s", "", True),
        ("images 16\n...", "", True),
        ("images 16\ndigest ...\ntook 3.2 s", "", True),
        ("images 17\ndigest 5a\ntook 3.2 s", "", False),
        ("images 16\ntook 3.2 s", "", False),
        ("images 16\ndigest 5a", "", False),
        ("images 16\ndigest 5a\ntook 3.2 s\nmore", "", False),
        ("images 17\ndigest 9a\ntook 3.2 s", "<!-- numbers vary: measured -->", True),
        ("masks 17\ndigest 9a\ntook 3.2 s", "<!-- numbers vary: measured -->", False),
        ("another", "<!-- not compared: measured -->", True),
    ],
)
def test_a_difference_is_found(text: str, comment: str, same: bool) -> None:
    assert (difference_to_example(text, comment) is None) == same


def test_only_a_block_directly_after_another_is_its_output() -> None:
    _, output = blocks_of("```bash\ntrue\n```\n\nA sentence.\n\n```text\nx\n```\n")
    assert not output.follows


def wrong_steps(text: str) -> list[str]:
    """Steps in the output blocks of a page that no command of the page before them reaches."""
    ends = {PRESETS["tiny"].optim.steps} if "run" in materials_of(text) else set()
    wrong = []
    for block in blocks_of(text):
        for command in re.findall(r"(?:sa1b train|-m sa1b\.train) ((?:[^\\\n]|\\\n)*)", block.code):
            preset = re.search(r"--preset (\w+)", command)
            steps = re.search(r"--optim\.steps (\d+)", command)
            if block.language == "bash" and preset and "-only" not in command and "--dry-run" not in command:
                ends.add(int(steps[1]) if steps else PRESETS[preset[1]].optim.steps)
        if block.language == "text":
            saved = [int(step) for step in re.findall(r"checkpoints/step-(\d+)", block.code)]
            passed = [int(step) for step in re.findall(r"^step (\d+): mIoU", block.code, re.MULTILINE)]
            wrong += [f"step {step}" for step in saved if step not in ends]
            wrong += [f"step {step}" for step in passed if step > max(ends, default=0)]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_shown_steps_are_those_of_the_commands(page: Path) -> None:
    assert wrong_steps(page.read_text(encoding="utf-8")) == []


def test_a_step_after_the_last_one_is_found() -> None:
    command = "```bash\nsa1b train --preset tiny --out run{}\n```\n```text\nstep 300: mIoU 0.7\n```\n"
    assert wrong_steps(command.format("")) == ["step 300"]
    assert wrong_steps(command.format(" \\\n    --optim.steps 300")) == []
