"""Wrong arguments of Stream, Loader, batches and transforms are refused where they are passed, by name."""

import copy
import re
import warnings
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import sa1b
from sa1b.errors import ManifestError, UsageError
from sa1b.masks import SizeError
from sa1b.storage.errors import StorageError
from sa1b.stream.plan import ResumeError
from sa1b.stream.transform import RandomCrop, ScaleJitter
from tests.shards import tiny
from tests.stream.leftovers import held

IMAGES = 8


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arguments")
    tiny.synthesize(folder / "sa_000001.tar", images=IMAGES, first_id=1, long_side=48)
    tiny.ingest_tar(folder / "sa_000001.tar", folder / "root", images_per_shard=4)
    return folder / "root"


def stream_of(root: Any, **arguments: Any) -> sa1b.Stream:
    return sa1b.Stream(root, **{"global_batch": 4, "image_size": 32, "masks": 2, **arguments})


@pytest.mark.parametrize(
    "argument",
    [
        *({"global_batch": value} for value in ("4", 8.0, True, 0, -1, None)),
        *({"micro_batch": value} for value in ("2", 1.0, 0)),
        *({"block_size": value} for value in ("4", 0, True)),
        *({"deadline": value} for value in (None, "3", 0, float("nan"))),
        *({"seed": value} for value in (True, 1.5, "1", None, 1 << 63)),
        *({"epochs": value} for value in (2, "1")),
        *({"image_size": value} for value in ("128", (128, 128), 128.0, 0)),
        *({"masks": value} for value in (None, "all", 1.5, -1)),
        *({"flip": value} for value in ("0.5", None, True, 1.5)),
        *({"min_pixels": value} for value in ("a", 1.5, -1)),
        *({"min_pixels_size": value} for value in ("a", 1.5, 0)),
        *({"world_size": value} for value in ("2", 0, 1.0)),
        *({"rank": value} for value in ("0", -1, 0.0)),
        *({"root": value} for value in (None, 3, "")),
        {"transform": RandomCrop},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_name_and_value(root: Path, argument: dict[str, Any]) -> None:
    ((name, value),) = argument.items()
    with pytest.raises(ValueError, match=rf"^{name}={re.escape(repr(value))} must be "):
        stream_of(**{"root": root, **argument})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 1, "world_size": 1}, "rank=1 must be from 0 to 0, below world_size=1; pass both"),
        ({"global_batch": 8, "block_size": 3}, "global_batch=8 must be a multiple of block_size=3"),
    ],
)
def test_messages_say_what_to_pass(root: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        stream_of(root, **arguments)


def test_an_unknown_argument_is_refused_with_the_nearest_one(root: Path) -> None:
    with pytest.raises(TypeError, match="^Stream.imagesize=....: no .*; did you mean 'image_size'"):
        stream_of(root, imagesize=3)
    with pytest.raises(TypeError, match="^Stream.microbatch=....: no .*; did you mean 'micro_batch'"):
        stream_of(root, microbatch=3)
    with pytest.raises(TypeError, match="^Stream.zzz=....: no such argument; choose from .*min_pixels_size"):
        stream_of(root, zzz=3)


def test_whole_numbers_of_numpy_are_taken(root: Path) -> None:
    three = np.int64(3)
    stream = stream_of(root, seed=three, global_batch=np.int32(4), masks=three, image_size=np.int16(32))
    assert stream.state_dict() == stream_of(root, seed=3, masks=3).state_dict()
    stream.set_epoch(np.int64(2))
    assert stream.position == 2 * IMAGES


@pytest.mark.parametrize("epoch", [1.5, "1", None, True, -1])
def test_an_epoch_that_is_no_whole_number_is_refused(root: Path, epoch: Any) -> None:
    for of in (stream_of(root), sa1b.Loader(stream_of(root), threads=1, quiet=True)):
        with pytest.raises(ValueError, match=f"^epoch={epoch!r} must be "):
            of.set_epoch(epoch)


def test_wrong_arguments_of_a_loader_are_refused_by_name() -> None:
    folder: Any = "shards"
    with pytest.raises(
        ValueError, match=r"^stream='shards' must be a sa1b.Stream or sa1b.Mix: Loader\(Stream"
    ):
        sa1b.Loader(folder)


def test_masks_refuse_sizes_that_are_none(root: Path) -> None:
    masks = next(iter(stream_of(root))).masks
    for size in (0, -1, "256", 1.5, True):
        for function in (masks.dense, masks.empty):
            with pytest.raises(SizeError):
                function(size)
    assert masks.dense(np.int64(8)).shape[1:] == (8, 8)


def test_transforms_refuse_ranges_that_are_none() -> None:
    with pytest.raises(ValueError, match="high="):
        ScaleJitter(2, 1)
    with pytest.raises(ValueError, match="area="):
        RandomCrop((0.5, 0.1))


@pytest.mark.parametrize(
    "change",
    [
        *(None, "x", [1], {"options": None}),
        *({"position": position} for position in (-5, "x", 2**62 + 1, 2**63, 2**70)),
    ],
)
def test_what_is_no_state_is_refused_when_it_is_loaded(root: Path, change: Any) -> None:
    stream = stream_of(root)
    state = {**stream.state_dict(), **change} if isinstance(change, dict) else change
    with pytest.raises(
        ResumeError,
        match="not the state of a stream|: has no |not a mapping|position=.* must be a whole number",
    ) as caught:
        stream.load_state_dict(state)
    assert caught.value.argument is None
    assert stream.position == 0


@pytest.mark.parametrize("epoch", [2**62, 2**70])
def test_an_epoch_beyond_all_positions_is_refused(root: Path, epoch: int) -> None:
    with pytest.raises(ValueError, match="epoch=.* must be a whole number from 0 to [0-9]+$"):
        stream_of(root).set_epoch(epoch)


def test_a_position_that_cuts_a_block_is_refused_when_it_is_loaded(root: Path) -> None:
    stream = stream_of(root, block_size=4)
    with pytest.raises(ResumeError, match="position=2 must be at the border of two blocks"):
        stream.load_state_dict({**stream.state_dict(), "position": 2})


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"seed": 5}, "seed", r"with seed 5, this stream 0: .* out; pass seed=5$"),
        ({"order": "sequential"}, "order", r"; pass order='sequential'$"),
        ({"block_size": 2}, "block_size", r"; pass block_size=2$"),
        (
            {"ids_sha256": "ab" * 32},
            "view",
            r"other images \(abababababab\) than all images of the directory \(",
        ),
        ({"masks_where": "area > 5"}, "view", r"condition on masks 'area > 5', all .* none: .*pass the view"),
    ],
)
def test_a_state_of_another_sequence_names_the_argument_and_one_way_out(
    root: Path, change: dict[str, Any], argument: str, message: str
) -> None:
    stream = stream_of(root)
    with pytest.raises(ResumeError, match=message) as caught:
        stream.load_state_dict({**stream.state_dict(), **change})
    assert caught.value.argument == argument


@pytest.mark.parametrize("arguments", [{}, {"batch_size": 4}])
def test_a_data_loader_that_would_batch_batches_is_told_what_to_pass(
    root: Path, arguments: dict[str, int]
) -> None:
    with pytest.raises(UsageError, match=r"DataLoader.*; pass batch_size=None"):
        next(iter(DataLoader(stream_of(root), **arguments)))


def test_a_file_as_root_is_refused_with_its_folder(root: Path) -> None:
    with pytest.raises(ManifestError, match=rf"dataset\.json: a file; pass its folder, '{root}'$"):
        stream_of(root / "dataset.json")


def test_a_copy_of_a_stream_has_its_own_transforms(root: Path) -> None:
    stream = stream_of(root, transform=[RandomCrop()])
    assert copy.deepcopy(stream).options.transform is not stream.options.transform


def test_a_stream_that_is_dropped_closes_its_files(root: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        stream: Any = stream_of(root)
        next(iter(stream))
        assert any(str(root) in one for one in held()["descriptors"])
        stream = None
        open_files = held()["descriptors"]
    assert not any(str(root) in one for one in open_files)
    assert [str(one.message) for one in caught if str(root) in str(one.message)] == []


def test_a_protocol_that_nothing_reads_is_named_with_what_is_possible() -> None:
    with pytest.raises(StorageError, match="^foo://x: fsspec has no protocol 'foo'; pass a folder, or a URL"):
        stream_of("foo://x")


def test_a_transform_that_a_spawned_worker_cannot_get_is_named_by_python(root: Path) -> None:
    stream = stream_of(root, transform=lambda frame, visit: frame)
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises((PicklingError, AttributeError), match="<lambda>"):  # the latter before Python 3.14
        next(iter(loader))
