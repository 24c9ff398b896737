"""Checks of arguments: integers of any library are accepted, other values are refused by name."""

import re
from math import inf, nan
from typing import Any

import numpy as np
import pytest

import sa1b
from sa1b.arguments import Range, number, path, plain_root, plain_words, whole_number
from sa1b.cli import main
from sa1b.errors import UsageError
from sa1b.recipes.presets import PRESETS
from sa1b.sam.model import Sam
from tests.cli.verb import called


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_become_ints(value: Any) -> None:
    assert type(whole_number("n", value)) is int
    assert whole_number("n", value, 3, 3) == 3
    assert number("n", value) == 3


@pytest.mark.parametrize(
    "value", [3.0, np.float32(3), True, np.True_, "3", None, [3], -1, 4, np.array([1, 2])]
)
def test_other_values_are_no_whole_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="^n=.* must be a whole number from 0 to 3$"):
        whole_number("n", value, 0, 3)


@pytest.mark.parametrize("value", [0, 1.5, float("nan"), True, "0.5", None, (1,), 1j])
def test_other_values_are_no_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="^n=.* must be a number above 0, up to 1$"):
        number("n", value, 0, 1, above=0)


@pytest.mark.parametrize(
    ("accepted", "inside", "outside", "text"),
    [
        (Range(1), (1, 9, None), (0, -1), "at least 1"),
        (Range(0, 1), (0, 1, 0.5), (-0.1, 1.1, nan), "from 0 to 1"),
        (Range(above=0, most=1), (1, 0.1), (0, 2), "more than 0 and at most 1"),
        (Range(above=0, below=inf, unit=" s"), (1e9,), (0, inf), "more than 0 and finite s"),
        (Range(0, below=1), (0, 0.9), (1, -1), "from 0 to below 1"),
    ],
)
def test_a_range_names_the_flag_the_value_and_what_is_accepted(
    accepted: Range, inside: tuple[Any, ...], outside: tuple[float, ...], text: str
) -> None:
    accepted.check("--x", *inside)
    for value in outside:
        with pytest.raises(UsageError, match=f"^--x {value:g}: must be {text}$"):
            accepted.check("--x", value)


@pytest.mark.parametrize("value", [None, 3, "", b"x"])
def test_other_values_are_no_paths(value: Any) -> None:
    with pytest.raises(ValueError, match="^root=.* must be a folder$"):
        path("root", value, "a folder")


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("file:/x/y", "/x/y"),
        ("file:///x/y", "/x/y"),
        ("file://localhost/x/y", "/x/y"),
        ("FILE://LOCALHOST/x", "/x"),
        ("S3://Bucket/Key", "s3://Bucket/Key"),
        ("Https://host/A?B", "https://host/A?B"),
        ("x/S3://y", "x/S3://y"),
        ("s3:/b/k", "s3:/b/k"),
        ("a:b", "a:b"),
        ("folder", "folder"),
    ],
)
def test_a_url_has_one_form(given: str, plain: str) -> None:
    assert plain_root(given) == plain
    assert plain_root(plain) == plain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("s3://", "names no bucket; pass a URL such as s3://BUCKET/FOLDER"),
        ("GS:///", "names no bucket; pass a URL such as gs://BUCKET/FOLDER"),
        ("https://", "names no host"),
        ("file://other/x", "names no file of this machine; pass its path"),
        ("file://", "names no file of this machine"),
        ("s3://[x/y", "no valid URL"),
        ("s3://key:PASS@bucket/y", "a bucket has no user; pass credentials in the environment"),
        ("http://host:99999/x", "no valid URL"),
        ("http://host:x/sa_1.tar", "no valid URL"),
    ],
)
def test_a_url_without_a_place_is_refused(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=words):
        plain_root(given)
    with pytest.raises(SystemExit):
        main(["locate", given, "5"])
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reshard", "--out", ""], "--out: is empty"),
        (["--out="], "--out: is empty"),
        (["photos", "", "--out", "x"], "argument 2: is empty"),
        ([""], "argument 1: is empty"),
        (["--out=~/x"], r"write \$HOME/x"),
        (["--out", "~"], r"write \$HOME$"),
        (["~/downloads"], r"write \$HOME/downloads"),
    ],
)
def test_a_folder_that_the_shell_did_not_name_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plain_words(words)


def test_other_words_are_kept() -> None:
    words = ["--filter", "", "--note=", "a~b", "--out", "S3://b/x"]
    assert plain_words(words) == [*words[:-1], "s3://b/x"]


@pytest.mark.parametrize(
    ("function", "name", "way_out"),
    [
        ("Stream", "batch_size", "pass global_batch, the images of a step on all ranks, or micro_batch"),
        ("Stream", "size", "pass image_size"),
        ("Loader", "num_workers", "pass Loader(stream, threads=...), or DataLoader("),
        ("Loader", "thread", "did you mean 'threads'?"),
        ("Loader", "batch_size", "pass global_batch, the images of a step on all ranks, or micro_batch"),
        ("Stream", "shuffle", "pass order='shuffle' or order='sequential' to Stream"),
        ("Stream", "device", "pass the device to Loader or load_model"),
        ("predict", "device", "pass the device to Loader or load_model"),
        ("load_model", "checkpoint", "pass source"),
        ("embed_image", "images", "did you mean 'image'?"),
        ("ground", "phrase", "did you mean 'phrases'?"),
        ("predict", "point_coords", "pass points"),
        ("Stream", "endpoint", "pass storage_options={'endpoint_url': ...}"),
        ("generate_masks", "pred_iou_thresh", "pass min_predicted_iou"),
        ("generate_masks", "zzz", "choose from points_per_side, "),
    ],
)
def test_names_of_other_libraries_lead_to_the_own_ones(function: str, name: str, way_out: str) -> None:
    model = Sam(PRESETS["tiny"].model)
    arguments: dict[str, tuple[Any, ...]] = {"Stream": ("shards",), "Loader": (None,)}
    message = re.escape(f"{function}({name}=...): no such argument; {way_out}")
    with pytest.raises(TypeError, match=f"^{message}"):
        getattr(sa1b, function)(*arguments.get(function, (model, None)), **{name: 1})


def test_an_unknown_argument_of_open_is_named_with_its_public_function() -> None:
    with pytest.raises(
        TypeError, match=r"^sa1b.open\(endpoint=...\): no such argument; pass storage_options"
    ):
        sa1b.open("shards", endpoint="http://127.0.0.1")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "own"),
    [("--pred-iou-thresh", "--min-predicted-iou"), ("--crop_n_layers", "--crop-layers"), ("--worker", None)],
)
def test_flags_of_the_other_mask_generator_lead_to_the_own_ones(given: str, own: str | None) -> None:
    done = called("annotate")("photos", "--weights", "run", "--out", "labels", given, 1)
    assert done.returncode == 2
    hint = f"did you mean {own}? " if own else ""
    assert done.stderr.startswith(f"error: {given}: no such flag; {hint}see ")
