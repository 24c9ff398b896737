"""A frozen image encoder whose embeddings are cached, in the training command."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sa1b.engine.config import parse
from sa1b.engine.planner import measure
from sa1b.recipes.presets import PRESETS
from sa1b.sam.recipe import encoder_flops
from tests.train.command import FLAGS, assert_same_state, losses, start, train_to_end

FREEZE = ("--optim.freeze", "image_encoder", "--model.drop-path", "0")


def cached(folder: Path) -> tuple[str, ...]:
    return (*FREEZE, "--embeddings.cache", str(folder), "--embeddings.cache-bytes", "1000000")


@pytest.fixture(scope="session")
def root(parted: Path) -> Path:
    return parted


def test_a_stopped_run_goes_on_bit_for_bit_with_any_files_of_the_cache(root: Path, tmp_path: Path) -> None:
    whole = train_to_end(root, tmp_path / "whole", *cached(tmp_path / "cache"))
    files = sorted((tmp_path / "cache").rglob("*.safetensors"))
    assert files
    for path in files[::2]:
        path.unlink()
    out = tmp_path / "run"
    train_to_end(root, out, *cached(tmp_path / "cache"), mishap={"what": "stop", "rank": 0, "step": 2})
    train_to_end(root, out, *cached(tmp_path / "other"))
    assert losses(out) == losses(whole)
    assert_same_state(out, whole)
    assert list((tmp_path / "other").rglob("*.safetensors"))
    plain = losses(train_to_end(root, tmp_path / "plain", *FREEZE))
    assert losses(whole) == pytest.approx(plain, rel=0.02)


@pytest.mark.parametrize(
    ("flags", "more", "message"),
    [
        (
            (),
            {},
            "--embeddings.cache near: .* --optim.freeze is not given; pass --optim.freeze image_encoder",
        ),
        (FREEZE, {"ranks": 2, "mode": "fsdp"}, "--embeddings.cache near: .* pass --parallel.mode ddp"),
    ],
)
def test_what_does_not_fit_is_refused(
    root: Path, tmp_path: Path, flags: tuple[str, ...], more: dict[str, Any], message: str
) -> None:
    near = ("--embeddings.cache", "near", "--embeddings.cache-bytes", "1")
    ended = start(root, tmp_path / "run", *near, *flags, **more)
    assert 2 in ended.codes
    assert any(re.search(message, output) for output in ended.outputs), ended.outputs
    assert not (tmp_path / "run").exists()


def test_a_plan_counts_no_operations_of_the_image_encoder_and_writes_nothing(
    root: Path, tmp_path: Path
) -> None:
    flags = [*FLAGS, "--data.root", str(root), *FREEZE]
    both = ["--embeddings.cache", str(tmp_path / "cache"), "--embeddings.cache-bytes", "1000000"]
    with_cache, without = (parse([*flags, *more], None, PRESETS) for more in (both, []))
    with torch.device("meta"):
        saved = without.build().flops(5, 9) - with_cache.build().flops(5, 9)
    assert saved == 5 * encoder_flops(with_cache.model)
    assert measure(with_cache, world_size=1).peak == measure(without, world_size=1).peak
    assert not (tmp_path / "cache").exists()


def test_ranks_share_a_cache(root: Path, tmp_path: Path) -> None:
    flags = cached(tmp_path / "cache")
    one = losses(train_to_end(root, tmp_path / "one", *flags))
    two = losses(train_to_end(root, tmp_path / "two", *flags, ranks=2, mode="ddp"))
    assert two == pytest.approx(one, rel=1e-5, abs=0)
