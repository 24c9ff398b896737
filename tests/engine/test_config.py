"""Settings from the command line: presets, help, and refused values."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from docstring_parser import parse as parse_docstring

from sa1b.engine import config as settings
from sa1b.engine.config import Config
from sa1b.errors import UsageError
from sa1b.recipes import presets
from sa1b.recipes.presets import DISTILL_PRESETS, GROUNDING_PRESETS, PRESETS, DistillConfig, SamConfig
from sa1b.sam.model import PRESETS as MODELS

ROOT = ("--data.root", "shards")
GROUNDING, TEXT = ("--preset", "grounding"), ("--data.text", "words.parquet")


def parse(flags: list[str], description: str | None) -> Config:
    return settings.parse(flags, description, PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_decides_all_that_no_flag_decides(preset: str) -> None:
    for spelled in (["--preset", preset], [f"--preset={preset}"]):
        text = ["--data.text", "words.parquet"] if preset in GROUNDING_PRESETS else []
        teacher = ["--distill.teacher", "vit_h"] if preset in DISTILL_PRESETS else []
        found = parse([*spelled, *ROOT, *text, *teacher, "--data.masks", "7"], None)
        expected = PRESETS[preset]
        data = dataclasses.replace(expected.data, root="shards", masks=7, text=text[1] if text else None)
        expected = dataclasses.replace(expected, data=data)
        if isinstance(expected, DistillConfig):
            expected = dataclasses.replace(expected, distill=presets.TeacherConfig("vit_h"))
        assert found == expected


def test_presets_have_the_published_models_and_batches() -> None:
    for name in ("vit_b", "vit_l", "vit_h"):
        assert dataclasses.replace(PRESETS[name].model, drop_path=0.0) == MODELS[name]
    batches = {name: PRESETS[name].data.global_batch for name in ("vit_b", "vit_l", "vit_h")}
    assert batches == {"vit_b": 128, "vit_l": 128, "vit_h": 256}
    assert PRESETS["vit_h"].optim.steps == 90_000


def test_sam2_has_the_published_recipe() -> None:
    config = PRESETS["sam2"]
    assert (config.recipe.clicks, config.recipe.unprompted, config.data.flip) == (7, 0, 0.5)
    assert (config.recipe.focal_weight, config.recipe.dice_weight, config.recipe.iou_weight) == (20, 1, 1)
    assert (config.recipe.iou_loss, config.recipe.iou_masks) == ("absolute", "all")
    assert (config.optim.schedule, config.optim.lr, config.optim.grad_clip) == ("rsqrt", 4e-4, 0.1)


@pytest.mark.parametrize("url", ["file:/tmp/run", "FILE:///tmp/run", "file://localhost/tmp/run"])
def test_urls_of_files_are_paths(url: str) -> None:
    assert parse(["--data.root", "x", f"--out={url}"], None).out == "/tmp/run"


def test_the_default_preset_is_vit_b() -> None:
    assert parse(list(ROOT), None).preset == "vit_b"


def _parts() -> list[tuple[str, type[Any]]]:
    nested: list[tuple[str, type[Any]]] = [("", SamConfig)]
    for field in dataclasses.fields(SamConfig):
        kind = field.default_factory
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            nested.append((f"{field.name}.", kind))
    return nested


@pytest.mark.parametrize(("prefix", "part"), _parts())
def test_help_shows_every_field_with_its_text(
    prefix: str, part: type[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # wider terminals have several columns of flags
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], "Trains.")
    assert ended.value.code == 0
    shown = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    texts = {}
    documented = [
        one for kind in reversed(part.__mro__) for one in parse_docstring(kind.__doc__ or "").params
    ]
    for parameter in documented:
        texts |= dict.fromkeys(re.split(r", ", parameter.arg_name), parameter.description or "")
    names = [field.name for field in dataclasses.fields(part)]
    assert set(names) <= set(texts), f"no text: {set(names) - set(texts)}"
    nested = {f"{name}." for name in names} & {prefix for prefix, _ in _parts()}
    for name in names:
        if f"{name}." not in nested:
            flag = f"{prefix}{'json' if name == 'json_output' else name}".replace("_", "-")
            off = re.sub(r"^(.*\.)?", r"\1no-", flag)  # the help of a flag that is on by default
            text = re.escape(" ".join(texts[name].split())[:24])
            if text.startswith("no\\ flag"):
                assert f"--{flag}" not in shown
                continue
            assert re.search(rf"--({flag}|{off}) .{{0,160}}?{text}", shown), f"--{flag} has no help"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--data.root: missing"),
        ([*ROOT, "--data.target-size", "8"], "--data.target-size 8: must be at least the 256 pixels"),
        (
            [*ROOT, *GROUNDING, "--evaluate-only", "--evaluation.coco", "a", "--evaluation.images", "b"],
            "--evaluation.coco: has no phrases for a grounding model",
        ),
        ([*ROOT, "--evaluation.every", "5"], "--evaluation.every 5: needs --evaluation.view"),
        ([*ROOT, "--evaluate-only"], "--evaluate-only: no images are named; pass --evaluation.view"),
        ([*ROOT, "--json"], "--json: is for --evaluate-only"),
        ([*ROOT, "--data.text", "a.parquet"], "the model of SamConfig reads no text"),
        ([*ROOT, *GROUNDING], "--data.text: missing; pass a table with a phrase for each mask"),
        (
            [*ROOT, "--data.masks", "0"],
            "leaves this model nothing to learn; pass at least 1, or --preset distill",
        ),
        ([*ROOT, "--data.flip", "1.5"], "--data.flip 1.5: must be from 0 to 1"),
        ([*ROOT, "--data.deadline", "nan"], "--data.deadline nan: must be more than 0 seconds"),
        ([*ROOT, "--optim.warmup", "900000"], "--optim.warmup 900000: must be less than --optim.steps"),
        ([*ROOT, "--optim.min-lr-ratio", "0.1"], "--optim.min-lr-ratio: is for --optim.schedule cosine"),
        ([*ROOT, "--recipe.focal-weight", "nan"], "--recipe.focal-weight nan: must be at least 0"),
        ([*ROOT, "--seed", str(1 << 63)], f"--seed {1 << 63}: must be from 0 to below {1 << 63}"),
        ([*ROOT, "--deadline", "6"], "--deadline 6: must be a time such as 06:30, a duration such as +08:00"),
        (
            [*ROOT, "--deadline", "2001-01-31T06:30"],
            "--deadline 2001-01-31T06:30: is past; pass a later time",
        ),
        ([*ROOT, "--logging.profile", "3"], "--logging.profile: must be followed by INT INT; see"),
    ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_flag(flags: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=re.escape(named)):
        parse(flags, None)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--data.nosuch", "1"], "--data.nosuch"),
        (["--preset", "vit_g"], "--preset"),
        (["--optim.steps", "many"], "--optim.steps"),
        (["--model.heads", "5"], "--model.width 768: must be a multiple of --model.heads 5"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(flags: list[str], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse([*ROOT, *flags], None)
    assert named in re.sub(r"[\s│]+", " ", str(refused.value))


@pytest.mark.parametrize("below", ["", "/step-00000006", "/step-00000006/new"])
def test_a_run_is_not_written_into_the_checkpoints_of_a_run(below: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000006").mkdir(parents=True)
    out = f"{run}/checkpoints{below}"
    named = f"--out {out}: is in the checkpoints of a run, which it would damage; pass --out {run} to resume"
    with pytest.raises(UsageError, match=re.escape(named)):
        parse([*ROOT, "--out", out], None)
    if below:
        with pytest.raises(UsageError, match="pass --out s3://b/run to resume"):
            parse([*ROOT, "--out", f"s3://b/run/checkpoints{below}"], None)
    new = parse([*ROOT, "--out", str(tmp_path / "checkpoints")], None)  # only a name
    assert new.out == str(tmp_path / "checkpoints")


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_run_is_not_written_into_a_dataset_directory(dry_run: list[str], tmp_path: Path) -> None:
    shards, other = tmp_path / "shards", tmp_path / "other"
    for folder in (shards, other):
        folder.mkdir()
        (folder / "dataset.json").write_text("{}")
    (tmp_path / "link").symlink_to(shards)
    for out in (shards, shards / "run", other, tmp_path / "link" / "run", tmp_path / "x" / ".." / "shards"):
        with pytest.raises(UsageError, match=re.escape(f"--out {out}: is a dataset directory or inside one")):
            parse(["--data.root", str(shards), "--out", str(out), *dry_run], None)
    parse(["--data.root", str(shards), "--out", str(tmp_path / "run"), *dry_run], None)
    parse(["--data.root", "s3://bucket/shards", "--out", str(tmp_path / "run"), *dry_run], None)


def test_other_ranks_print_nothing_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError):
        parse([*ROOT, "--data.nosuch", "1"], None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "expected", "note"),
    [
        ("--preset tiny --optim.steps 3", (3, 0, 0), "--optim.warmup 0: the preset's 20 of 200 steps"),
        ("--preset tiny --optim.steps=20", (20, 2, 0), "--optim.warmup 2: the preset's 20 of 200 steps"),
        ("--preset tiny --optim.steps 21", (21, 20, 0), ""),
        ("--preset tiny --optim.steps 3 --optim.warmup 1", (3, 1, 0), ""),
        (
            "--preset sam2 --optim.steps 900",
            (900, 10, 50),
            "--optim.cooldown 50: the preset's 5000 of 90,000",
        ),
    ],
)
def test_a_warm_up_that_is_not_passed_is_shortened_with_the_steps(
    words: str, expected: tuple[int, int, int], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    optim = settings.parse(["--data.root", "shards", *words.split()], None, PRESETS).optim
    assert (optim.steps, optim.warmup, optim.cooldown) == expected
    printed = capsys.readouterr().err
    assert note in printed
    assert bool(note) == bool(printed)


def test_a_warm_up_that_is_passed_and_does_not_fit_is_refused() -> None:
    words = ["--data.root", "shards", "--preset", "tiny", "--optim.steps", "3", "--optim.warmup", "9"]
    with pytest.raises(UsageError, match=r"--optim.warmup 9: must be less than --optim.steps 3"):
        settings.parse(words, None, PRESETS)


@pytest.mark.parametrize(
    ("words", "world_size", "mode"),
    [
        ("", 2, "ddp"),
        ("", 1, "none"),
        ("--parallel.mode=fsdp", 2, "fsdp"),
    ],
)
def test_several_ranks_have_the_mode_ddp_if_none_is_passed(
    words: str, world_size: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    assert settings.parse(["--data.root", "x", *words.split()], None, PRESETS).parallel.mode == mode
    monkeypatch.delenv("WORLD_SIZE")
    found = settings.parse(["--data.root", "x", *words.split()], None, PRESETS, world_size=world_size)
    assert found.parallel.mode == mode


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        ("", "tiny"),
        ("--preset vit_b", "vit_b"),
        ("--init sam_vit_b.pth", "vit_b"),
        ("--evaluate-only", "vit_b"),
    ],
)
def test_without_a_gpu_a_new_run_has_the_preset_tiny(words: str, preset: str) -> None:
    images = ("--evaluation.view", "some") if "--evaluate-only" in words else ()
    arguments = ["--data.root", "shards", *words.split(), *images]
    assert settings.parse(arguments, None, PRESETS, on_cpu="tiny").preset == preset


@pytest.mark.parametrize(("epochs", "steps"), [(1, 5), (2.0, 9), (0.5, 3), (0.01, 1)])
def test_epochs_are_rounded_up_to_complete_steps(epochs: float, steps: int) -> None:
    given = ["--data.root", "shards", "--preset", "tiny", "--data.global-batch", "5", "--optim.warmup", "0"]
    config = settings.parse([*given, "--optim.epochs", str(epochs)], None, PRESETS)
    assert settings.with_steps(config, 22).optim.steps == steps
    assert settings.with_steps(settings.parse(given, None, PRESETS), 22).optim.steps == 200


def test_epochs_shorten_a_warm_up_that_is_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data.root", "r", "--preset", "tiny", "--optim.epochs", "1"]
    optim = settings.with_steps(settings.parse(given, None, PRESETS), 22).optim
    assert (optim.steps, optim.warmup, optim.fitting) == (3, 0, ())
    assert capsys.readouterr().err == (
        "--optim.warmup 0: the preset's 20 of 200 steps, in proportion to --optim.steps 3\n"
    )
    config = settings.parse([*given, "--optim.warmup", "20"], None, PRESETS)
    with pytest.raises(UsageError, match=r"^--optim.warmup 20: must be less than --optim.steps 3"):
        settings.with_steps(config, 22)


def test_a_message_about_a_size_of_the_model_begins_with_its_flag() -> None:
    with pytest.raises(UsageError, match=r"^--model.checkpoint-blocks some: must be none, all or every:2"):
        settings.parse(["--data.root", "r", "--model.checkpoint-blocks", "some"], None, PRESETS)
