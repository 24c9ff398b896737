"""Files of weights: written weights are read back, damaged and other files are refused, no code runs."""

import dataclasses
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sa1b.errors import UsageError
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.published import WeightsError, config_of, misfit, preset_of, read_weights, write_weights
from tests.sam import published

SMALL = ModelConfig(
    image_size=48, width=24, depth=3, heads=2, global_blocks=(1,), window=2, channels=32, drop_path=0.1
)


@pytest.fixture(scope="module")
def model() -> Sam:
    torch.manual_seed(0)
    return Sam(SMALL)


@pytest.fixture(params=["sam.pth", "sam.safetensors"])
def file(request: pytest.FixtureRequest, model: Sam, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    write_weights(path, model.state_dict())
    return path


def equal(one: dict[str, Tensor], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_written_comes_back_bit_for_bit(file: Path, model: Sam) -> None:
    assert equal(read_weights(file), model.state_dict())
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_same_weights_have_the_same_bytes(tmp_path: Path, model: Sam) -> None:
    written = set()
    for number in range(6):
        path = tmp_path / f"{number}.safetensors"
        write_weights(path, model.state_dict())
        written.add(path.read_bytes())
    assert len(written) == 1


def test_a_tensor_with_two_names_is_written_twice(tmp_path: Path) -> None:
    write_weights(tmp_path / "tied.safetensors", dict.fromkeys("ab", torch.ones(4)))
    assert (tmp_path / "tied.safetensors").read_bytes().endswith(torch.ones(8).numpy().tobytes())


def test_the_published_code_loads_what_is_written(file: Path, model: Sam) -> None:
    reference = published.build(SMALL)
    if file.suffix == ".pth":
        loaded = torch.load(file, weights_only=True)
    else:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            loaded = {name: opened.get_tensor(name) for name in names}
    reference.load_state_dict(loaded, strict=True)
    assert equal(dict(reference.state_dict()), model.state_dict())


def test_what_the_published_code_saves_is_read(tmp_path: Path) -> None:
    reference: nn.Module = published.build(SMALL)
    torch.save(reference.state_dict(), tmp_path / "theirs.pth")
    assert equal(read_weights(tmp_path / "theirs.pth"), reference.state_dict())


def test_every_flipped_byte_is_found_or_changes_nothing(file: Path, model: Sam) -> None:
    whole = file.read_bytes()
    refused = []
    for position in range(3, len(whole), len(whole) // 60):
        data = bytearray(whole)
        data[position] ^= 0x10
        file.write_bytes(data)
        try:
            found = read_weights(file)
        except WeightsError as error:
            refused.append(str(error))
        else:
            assert equal(found, model.state_dict())  # padding between the parts of an archive
    assert len(refused) > 40
    assert all(str(file) in message for message in refused)


@pytest.mark.parametrize("length", [0, 10, 1000, -1000, -1])
def test_a_cut_file_is_refused(length: int, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(WeightsError, match="damaged"):
        read_weights(file)


@pytest.mark.parametrize("text", ['{"info":{"year":2026},"images":[]}', '{"images": []}', "id,name\n1,a\n"])
def test_a_file_of_another_kind_is_not_called_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    begin = re.escape(repr(text[:16].encode()))
    with pytest.raises(
        WeightsError, match=f"other.json: not a file of weights, it begins with {begin}; pass"
    ):
        read_weights(tmp_path / "other.json")


class Hostile:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.canary), "w")


@pytest.mark.parametrize(
    "write",
    [
        torch.save,
        lambda value, path: torch.save(value, path, _use_new_zipfile_serialization=False),
        lambda value, path: path.write_bytes(pickle.dumps(value)),
    ],
    ids=["archive", "legacy", "pickle"],
)
def test_a_file_that_would_run_code_does_not(
    write: Callable[[Any, Path], object], tmp_path: Path, model: Sam
) -> None:
    canary = tmp_path / "canary"
    write({**model.state_dict(), "extra": Hostile(canary)}, tmp_path / "hostile.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(WeightsError, match="hostile.pth: damaged, or holds objects other than tensors"):
            read_weights(tmp_path / "hostile.pth")
    assert not canary.exists()
    pickle.loads(pickle.dumps(Hostile(canary)))
    assert canary.exists()  # unpickling would have created it


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"weight": torch.ones(3)}, "holds 1 tensors, such as weight"),
        ({}, "holds 0 tensors, such as none"),
        ({"model": {"weight": torch.ones(3)}}, "holds 1 tensors, such as weight"),
        ({"weights": {"weight": torch.ones(3)}}, "'weights' is a dict"),
        ({0: torch.ones(3)}, "not a plain dictionary of tensors, 0 is a Tensor"),
        ([torch.ones(3)], "holds a list"),
        (torch.ones(3), "holds a Tensor"),
    ],
)
def test_a_foreign_file_is_refused_and_said_what_it_holds(
    content: object, complaint: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "foreign.pth")
    with pytest.raises(WeightsError, match=complaint):
        read_weights(tmp_path / "foreign.pth")


def test_a_weight_too_many_or_too_few_or_of_another_shape_is_named(tmp_path: Path, model: Sam) -> None:
    path = tmp_path / "odd.safetensors"
    name = "mask_decoder.iou_token.weight"
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for changed, complaint in (
        ({**weights, "mask_decoder.more": torch.ones(2)}, r"mask_decoder.more is \[2\], .* needs nothing"),
        ({key: value for key, value in weights.items() if key != name}, f"{name} is missing"),
        ({**weights, name: torch.ones(1, 64)}, rf"{name} is \[1, 64\], .* needs \[1, 32\]"),
        ({**weights, name: torch.ones(1, 32, dtype=torch.int64)}, f"{name} is torch.int64"),
    ):
        save_file(changed, path)
        with pytest.raises(WeightsError, match=complaint):
            read_weights(path)


def test_a_missing_first_tensor_and_a_prefix_are_named(tmp_path: Path, model: Sam) -> None:
    first, path = "image_encoder.pos_embed", tmp_path / "weights.pth"
    weights = model.state_dict()
    torch.save({key: value for key, value in weights.items() if key != first}, path)
    with pytest.raises(WeightsError, match=rf"not a SAM \({first} must be in it\)"):
        read_weights(path)
    torch.save({f"module.{key}": value for key, value in weights.items()}, path)
    with pytest.raises(WeightsError, match=rf"there is module.{first}: remove the prefix 'module.'"):
        read_weights(path)


def test_half_precision_becomes_float32(tmp_path: Path, model: Sam) -> None:
    halves = {name: tensor.half() for name, tensor in model.state_dict().items()}
    torch.save(halves, tmp_path / "half.pth")
    assert equal(read_weights(tmp_path / "half.pth"), {name: half.float() for name, half in halves.items()})


@pytest.mark.parametrize("name", [name for name, one in PRESETS.items() if not one.backbone])
def test_the_sizes_of_a_model_follow_from_its_weights(name: str) -> None:
    with torch.device("meta"):
        weights = Sam(PRESETS[name]).state_dict()
    assert config_of(weights) == PRESETS[name]
    assert preset_of(config_of(weights)) == name


def test_sizes_of_no_preset_follow_too(model: Sam) -> None:
    assert config_of(model.state_dict()) == dataclasses.replace(SMALL, drop_path=0.0)
    assert preset_of(SMALL) is None


def test_windows_may_be_larger_than_the_image(tmp_path: Path) -> None:
    wide = dataclasses.replace(SMALL, window=5, drop_path=0.0)  # the image has 3 x 3 tokens
    weights = Sam(wide).state_dict()
    assert config_of(weights) == wide
    write_weights(tmp_path / "sam.pth", weights)
    assert equal(read_weights(tmp_path / "sam.pth"), weights)
    assert misfit(weights, SMALL) == (
        "weights of other sizes: --model.window is 2, the weights have 5: pass --model.window 5"
    )


def test_another_ending_is_refused(tmp_path: Path, model: Sam) -> None:
    with pytest.raises(UsageError, match="must end with .pth or .safetensors"):
        write_weights(tmp_path / "sam.bin", model.state_dict())
    assert list(tmp_path.iterdir()) == []


def shapes(config: ModelConfig) -> dict[str, Tensor]:
    with torch.device("meta"):
        return Sam(config).state_dict()


@pytest.mark.parametrize(
    ("weights", "model", "sentence"),
    [
        (
            PRESETS["tiny"],
            dataclasses.replace(PRESETS["tiny"], width=96),
            "tiny weights of other sizes: --model.width is 96, the weights have 128: "
            "pass --preset tiny without --model.width",
        ),
        (
            SMALL,
            dataclasses.replace(SMALL, width=48),
            "weights of other sizes: --model.width is 48, the weights have 24: pass --model.width 24",
        ),
        (
            dataclasses.replace(SMALL, global_blocks=(0, 2)),
            SMALL,
            "weights of other sizes: --model.global-blocks is 1, the weights have 0 2: "
            "pass --model.global-blocks 0 2",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_sentence(
    weights: ModelConfig, model: ModelConfig, sentence: str
) -> None:
    assert misfit(shapes(weights), model) == sentence
    assert misfit(shapes(weights), weights) is None


def test_tensors_of_something_else_do_not_fit() -> None:
    why = "not a SAM (image_encoder.pos_embed must be in it): it holds 1 tensors, such as head.weight"
    assert misfit({"head.weight": torch.ones(2)}, SMALL) == why
