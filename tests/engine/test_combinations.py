"""The table of docs/parallel.md: combinations that work have the steps of one process; others are refused."""

import dataclasses
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from sa1b.engine.settings import ParallelConfig
from sa1b.errors import UsageError
from tests.engine import combination_ranks
from tests.engine.launch import launch
from tests.processes import REPOSITORY

MODES = ("none", "ddp", "fsdp")
PAGE = Path(REPOSITORY, "docs", "parallel.md").read_text(encoding="utf-8")
TABLE = {
    found[1]: dict(zip(MODES, re.findall(r"yes|no", found[2]), strict=True))
    for found in re.finditer(r"^\| `--parallel\.([^`]+)` ((?:\| (?:yes|no) ){3})\|$", PAGE, re.MULTILINE)
}


def config_of(mode: Any, *settings: str) -> ParallelConfig:
    values: dict[str, Any] = {}
    for setting in settings:
        flag, _, value = setting.partition(" ")
        values[flag.replace("-", "_")] = int(value) if value.isdecimal() else value or True
    return ParallelConfig(mode=mode, **values)


def works(mode: str, *settings: str) -> bool:
    flags = [setting.partition(" ")[0] for setting in settings]
    return all(TABLE[setting][mode] == "yes" for setting in settings) and len(flags) == len(set(flags))


def test_the_table_has_every_setting_that_works_in_some_modes_only() -> None:
    flags = {setting.partition(" ")[0] for setting in TABLE}
    assert flags >= {
        "precision",
        "shard",
        "replicas",
        "offload",
        "wrap",
        "reduce",
        "compress",
        "static-graph",
    }


@pytest.mark.parametrize("mode", MODES)
def test_single_settings_and_pairs_are_refused_as_the_table_says(mode: str) -> None:
    world_size = 1 if mode == "none" else 4
    cases = [(one,) for one in TABLE] + list(combinations(TABLE, 2))
    for settings in cases:
        if len({one.partition(" ")[0] for one in settings}) < len(settings):
            continue
        if works(mode, *settings):
            config_of(mode, *settings).check(world_size)
        else:
            with pytest.raises(UsageError, match=r"--parallel\.\S+.*; (drop|pass|must)|must be"):
                config_of(mode, *settings).check(world_size)


def test_all_ranks_take_the_buffers_of_the_first() -> None:
    assert launch(combination_ranks.shared_buffers, 2) == [[1.0, 1.0, 0.0]] * 2


@pytest.mark.slow
def test_all_combinations_that_work_take_the_steps_of_one_process() -> None:
    cases = {}
    for mode in ("ddp", "fsdp"):
        for size in (0, 1, 2):
            for settings in combinations(TABLE, size):
                if works(mode, *settings):
                    cases[" ".join([mode, *settings])] = dataclasses.replace(
                        config_of(mode, *settings), device="cpu"
                    )
    torch.set_num_threads(1)
    alone = combination_ranks.first_steps({"none": ParallelConfig()})["none"]
    ranks = launch(combination_ranks.first_steps, 4, cases)
    for name in cases:
        losses = torch.tensor([rank[name]["losses"] for rank in ranks]).sum(dim=0)
        tolerance = 0.05 if re.search("bf16|fp16", name) else 1e-4
        assert losses.tolist() == pytest.approx(alone["losses"], rel=tolerance), name
        for rank in ranks:
            assert rank[name]["norms"] == pytest.approx(alone["norms"], rel=10 * tolerance), name
