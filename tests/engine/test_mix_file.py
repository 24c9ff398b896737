"""`--data.mix`: the file of sources, and what is refused."""

from pathlib import Path

import pytest

from sa1b.engine.mix_file import read_mix, roots_of
from sa1b.engine.settings import DataConfig
from sa1b.errors import UsageError

GOOD = """
sources:
  sa1b: {root: shards, weight: 3, view: train, masks: 16}
  mine: {root: s3://bucket/mine, weight: 1/3, seed: 7, layers: [round2], evaluation_view: null}
schedule:
  - {from_step: 100, weights: {sa1b: 1, mine: 1}}
  - {from_position: 5000, weights: {sa1b: 1, mine: 0}}
"""


def settings(path: Path, text: str, **options: object) -> DataConfig:
    (path / "mix.yaml").write_text(text)
    return DataConfig(mix=str(path / "mix.yaml"), global_batch=8, **options)


def test_a_source_has_the_settings_of_the_flags_and_its_own(tmp_path: Path) -> None:
    config = settings(tmp_path, GOOD, flip=0.5, masks=4, deadline=9)
    (first, second), schedule = read_mix(config)
    assert (first.name, first.weight, first.seed, first.data.root) == ("sa1b", 3, None, "shards")
    assert (first.data.masks, first.data.flip, first.data.view, first.data.mix) == (16, 0.5, "train", None)
    assert (second.weight, second.seed, second.data.layers, second.data.masks) == ("1/3", 7, ("round2",), 4)
    assert second.data.deadline == 9
    assert [one.view("held-out") for one in (first, second)] == ["held-out", None]
    assert schedule == {800: {"sa1b": 1, "mine": 1}, 5000: {"sa1b": 1, "mine": 0}}
    assert roots_of(config) == ["shards", "s3://bucket/mine"]
    assert roots_of(DataConfig(root="a")) == ["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expected `object`, got `null`; write sources: {NAME: {root: FOLDER, weight: 1}}, see"),
        ("sources: [1]", "Expected `object`, got `array` - at `$.sources`"),
        ("sources: {a: {root: x, weight: 1}}\nshedule: []", "unknown field `shedule`"),
        ("sources: {a: {root: x}}", "source a: Object missing required field `weight`"),
        ("sources: {a: {root: x, weight: [1]}}", "source a: Expected `int | float | str`, got `array`"),
        (
            "sources: {a: {root: x, weight: 1, maks: 3}}",
            "source a: maks: no setting of a source; it has weight, ",
        ),
        ("sources: {a: {root: x, weight: 1, global_batch: 3}}", "global_batch: no setting of a source"),
        (
            "sources: {a: {root: x, weight: 1, masks: many}}",
            "source a: Expected `int`, got `str` - at `$.masks`",
        ),
        ("sources: {a: {root: x, weight: 1, masks: -1}}", "source a: --data.masks -1: must be"),
        (
            "sources: {a: {root: x, weight: 1}}\nschedule: [{weights: {a: 1}}]",
            "no from_step and no from_position",
        ),
        ("sources: {a: {root: x, weight: 1}", "column 1; write sources: "),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        read_mix(settings(tmp_path, text))
    assert str(refused.value).startswith(f"--data.mix {tmp_path / 'mix.yaml'}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
