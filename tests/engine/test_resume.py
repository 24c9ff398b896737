"""Settings that differ from those of the checkpoint are named when a run resumes."""

from pathlib import Path
from typing import Any

import pytest

from sa1b.engine.checkpoint import resume
from sa1b.engine.checkpoint.folder import check_files
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS
from sa1b.storage.atomic import json_bytes
from sa1b.storage.store import FolderStore

CONFIG = PRESETS["tiny"].document()


def changed(name: str, value: Any) -> dict[str, Any]:
    part, _, field = name.partition(".")
    return {**CONFIG, part: {**CONFIG[part], field: value}}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("optim.lr", 0.5, "--optim.lr 0.003 -> 0.5"),
        ("recipe.clicks", 3, "--recipe.clicks 1 -> 3"),
        ("model.drop_path", 0.5, "--model.drop-path 0.0 -> 0.5"),
        ("data.global_batch", 4, "--data.global-batch 8 -> 4"),
        ("data.masks", 4, "--data.masks 16 -> 4"),
        ("data.flip", 0.0, "--data.flip 0.5 -> 0.0"),
        ("data.tokenizer", "words.json", "--data.tokenizer bytes -> words.json"),
        ("parallel.precision", "bf16", "--parallel.precision fp32 -> bf16"),
        ("parallel.compress", "bf16", "--parallel.compress none -> bf16"),
        ("parallel.reduce", "bf16", "--parallel.reduce fp32 -> bf16"),
        ("optim.freeze", ["mask_decoder"], "--optim.freeze (none) -> mask_decoder"),
    ],
)
def test_settings_that_change_the_training_are_named_with_both_values(
    name: str, value: Any, said: str
) -> None:
    assert resume.changes(CONFIG, changed(name, value), 1200) == [
        f"settings that differ from those of step 1,200: {said}"
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [("data.root", "elsewhere"), ("data.threads", 3), ("parallel.mode", "ddp"), ("logging.every", 9)],
)
def test_settings_that_do_not_change_it_are_not(name: str, value: Any) -> None:
    assert resume.changes(CONFIG, changed(name, value), 1200) == []


def test_a_setting_that_an_older_checkpoint_does_not_know_is_no_difference() -> None:
    older = {**CONFIG, "optim": {name: value for name, value in CONFIG["optim"].items() if name != "ema"}}
    assert resume.changes(older, CONFIG, 1) == []


OTHERS = {
    "config.json": '{\n  "architectures": ["SamModel"]\n}',
    "metrics.jsonl": '{"step": 1, "loss": 0.5}\n',
    "predictions.jsonl": '{"id": 7}\n',
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_no_run_wrote_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(OTHERS[name])
    with pytest.raises(UsageError, match=f"--out RUN: {name} in it is not of a run of this program"):
        check_files(FolderStore(tmp_path), "RUN")
    if name != "predictions.jsonl":
        check_files(FolderStore(tmp_path), "RUN", "predictions.jsonl")


def test_the_files_of_a_run_are_replaced_also_of_one_that_was_killed_early(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"run": {"step": 0}}\n')
    (tmp_path / "predictions.jsonl").write_text('{"image_id": 7, "masks": []}\n')
    (tmp_path / "notes.json").write_text("{}")
    check_files(FolderStore(tmp_path), "RUN")
    (tmp_path / "metrics.jsonl").write_text("")
    check_files(FolderStore(tmp_path), "RUN")
    for name, text in OTHERS.items():  # in the folder of a run
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_bytes(json_bytes(CONFIG))
    check_files(FolderStore(tmp_path), "RUN")
