"""No command changes or removes a file of a user that it was not told to write; the campaign is sentinels.py."""

import inspect
import re
from pathlib import Path

import pytest

from sa1b.verbs import in_order, module_of
from tests.cli import sentinels

VERBS = [verb for verb in in_order() if " " not in verb]
SUBVERBS = [verb for verb in in_order() if " " in verb]


def test_commands_leave_the_files_of_a_user(tmp_path: Path) -> None:
    fixed = [
        ["reshard", "--out", "out", "--finish"],
        ["reshard", "--out", "out", "--drop", "sa_000000"],
        ["reshard", "tars", "--out", "out", "--redo", "sa_000000", "--spill", "user"],
        ["index", "out", "--tables"],
        ["verify", "out", "--state", "user/empty.txt"],
        ["export", "out", "--to", "sa1b", "--out", "export", "--overwrite"],
    ]
    assert sentinels.campaign(tmp_path, fixed) == []


# Parameters of the verbs that are neither a path nor a name of something stored.
OTHER = {
    *("masks_where", "images_where", "subset", "held_out", "sort", "memory", "device", "address", "engine", "endpoint"),
    *("accept", "task", "only", "skip", "part", "image_ids", "preset", "ranks", "modes", "precisions", "gpu", "sql"),
    *("arguments", "partition", "account", "time", "setup", "sbatch", "split", "missing", "to", "segmentation"),
    *("layout", "survey", "precision", "kind", "form", "block_size", "cache_gb"),
}  # fmt: skip


@pytest.mark.parametrize(
    "verb", [verb for verb in (*VERBS, *SUBVERBS) if verb not in ("train", "plan train")]
)
def test_the_campaign_has_every_argument_that_is_a_path_or_a_name(verb: str) -> None:
    covered = set()
    for line, (_, flags) in sentinels.FLAGS.items():
        if line == verb or (line.startswith(f"{verb} ") and line not in SUBVERBS):
            covered |= {flag.removeprefix("--").replace("-", "_").lower() for flag in flags}
            covered |= {word.removeprefix("--") for word in line.split() if word.startswith("--")}
    parameters = inspect.signature(module_of(verb).main).parameters
    texts = {name for name, one in parameters.items() if re.search(r"\bstr\b|Path", _type(one.annotation))}
    positional = {name for name in texts if parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY}
    assert texts - positional - OTHER <= covered
    assert len(positional - OTHER) <= sum(
        not flag.startswith("--") for line, (_, flags) in sentinels.FLAGS.items() if line.split()[0] == verb.split(maxsplit=1)[0]
        for flag in flags
    )  # fmt: skip


def _type(annotation: object) -> str:
    return str(getattr(annotation, "__origin__", annotation))


@pytest.mark.slow
def test_hostile_command_lines_leave_the_files_of_a_user(tmp_path: Path) -> None:
    assert sentinels.campaign(tmp_path, 300, seed=7) == []
