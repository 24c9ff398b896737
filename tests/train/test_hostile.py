"""A pickle in a run or in a file of weights runs no code: all that reads it refuses it, with the file's name."""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils import collect_env

import sa1b
from sa1b.errors import Sa1bError
from tests import kit
from tests.train.damage import seal
from tests.train.inside import SAM, make_root, train

GROUNDING = (
    *("--preset", "grounding_tiny", "--model.image-size", "64", "--model.width", "32", "--model.heads", "2"),
    *("--model.window", "2", "--model.channels", "32", "--text.width", "32", "--text.depth", "1"),
    *("--text.heads", "2", *SAM[-8:]),
)
CANARY = "canary"  # in the working directory of each test
CODE: dict[str, tuple[Callable[..., Any], Any]] = {
    "os.system": (os.system, f"touch {CANARY}"),
    "open": (open, (CANARY, "w")),
    "exec": (exec, f"open({CANARY!r}, 'w').close()"),
    "of torch": (collect_env.run, f"touch {CANARY}"),
}


class Hostile:
    """An object that creates the canary when it is unpickled without checks."""

    def __init__(self, function: str) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        function, given = CODE[self.function]
        return function, given if isinstance(given, tuple) else (given,)


@pytest.fixture(autouse=True)
def _canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    assert not Path(CANARY).exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset directory, an image, and two runs with the checkpoints 1 and 2."""
    folder = tmp_path_factory.mktemp("hostile")
    root = make_root(folder)
    cv2.imwrite(str(folder / "photo.jpg"), np.zeros((48, 64, 3), np.uint8))
    ids = [int(number) for sample in sa1b.open(root) for number in sample.annotations.mask_id]
    pq.write_table(
        pa.table({"mask_id": ids, "text": [f"thing {number}" for number in ids]}), folder / "phrases.parquet"
    )
    kit.run("view", root, "--masks-where", "area > 0", "--name", "all")
    common = ("--data.root", root, "--optim.steps", 2, "--checkpoint.every", 1)
    train(*SAM, *common, "--out", folder / "sam")
    train(*GROUNDING, *common, "--data.text", folder / "phrases.parquet", "--out", folder / "grounding")
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run of SAM."""
    return Path(shutil.copytree(runs / "sam", tmp_path / "run"))


def newest(run: Path, step: int = 2) -> Path:
    return run / "checkpoints" / f"step-{step:08}"


# Ways to put an object into a checkpoint; each returns the name of the file


def the_table(checkpoint: Path, hostile: Hostile) -> str:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(hostile))
    return ".metadata"


def in_the_table(where: str, protocol: int) -> Callable[[Path, Hostile], str]:
    def put(checkpoint: Path, hostile: Hostile) -> str:
        data = pickle.loads((checkpoint / ".metadata").read_bytes())
        if where == "storage_data":
            data.storage_data[next(iter(data.storage_data))] = hostile
        elif where == "state_dict_metadata":
            data.state_dict_metadata[next(iter(data.state_dict_metadata))] = hostile
        else:
            setattr(data, where, hostile)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(data, protocol=protocol))
        return ".metadata"

    return put


def bytes_of(form: str, content: object) -> bytes:
    data = io.BytesIO()
    if form == "pickle":
        pickle.dump(content, data)
    else:
        torch.save(content, data, _use_new_zipfile_serialization=form == "archive")
    return data.getvalue()


def a_tensor(form: str, end: str = "") -> Callable[[Path, Hostile], str]:
    """In place of the tensor whose name has this end, at the end of the file of tensors."""

    def put(checkpoint: Path, hostile: Hostile) -> str:
        (file,) = checkpoint.glob("*.distcp")
        data = pickle.loads((checkpoint / ".metadata").read_bytes())
        place = next(place for key, place in data.storage_data.items() if key.fqn.endswith(end or "weight"))
        payload = bytes_of(form, hostile)
        place.offset, place.length = file.stat().st_size, len(payload)
        file.write_bytes(file.read_bytes() + payload)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(data))
        return ""  # no file is named: torch's message is passed on

    return put


def the_state(checkpoint: Path, hostile: Hostile) -> str:
    (checkpoint / "state.json").write_bytes(pickle.dumps(hostile))
    return "state.json"


WAYS = {
    "the table": the_table,
    **{
        f"{where} of the table": in_the_table(where, 2 + number % 4)
        for number, where in enumerate(
            ("planner_data", "storage_meta", "storage_data", "state_dict_metadata", "version")
        )
    },
    **{f"a tensor as {form}": a_tensor(form) for form in ("archive", "legacy", "pickle")},
    "the state": the_state,
}
FEW = ("the table", "storage_meta of the table", "a tensor as archive", "the state")


# Readers of a run, or of another source of weights; each ends with its exit code and message


def resumed(run: object, runs: Path) -> kit.Done:
    return train(*SAM, "--data.root", runs / "root", "--out", run, "--optim.steps", 3, code=None)


def initial(run: object, runs: Path) -> kit.Done:
    return train(
        *SAM, "--data.root", runs / "root", "--out", "new", "--init", run, "--optim.steps", 2, code=None
    )


def evaluated(run: object, runs: Path) -> kit.Done:
    words = ("--data.root", runs / "root", "--evaluate-only", "--evaluation.view", "all", "--init", run)
    return train(*SAM, *words, "--out", "scores", code=None)


def taught(run: object, runs: Path) -> kit.Done:
    words = ("--preset", "distill_tiny", *SAM[2:-8], "--data.root", runs / "root", "--optim.steps", 2)
    return train(*words, "--optim.warmup", 1, "--distill.teacher", run, "--out", "new", code=None)


def converted(run: object, runs: Path) -> kit.Done:
    return kit.run("convert", run, "--out", "weights.safetensors", code=None)


def annotated(run: object, runs: Path) -> kit.Done:
    few = ("--points-per-side", 1, "--out", "labelled")
    return kit.run("annotate", runs / "photo.jpg", "--weights", run, *few, code=None)


def replayed(run: object, runs: Path) -> kit.Done:
    return kit.run("replay", runs / "sam", "--step", 1, "--weights", run, "--json", code=None)


def loaded(run: object, runs: Path, load: Callable[..., object] = sa1b.load_model) -> kit.Done:
    try:
        load(Path(str(run)))
    except Sa1bError as error:
        return kit.Done(2, "", str(error))
    return kit.Done(0, "", "")


CODES = {resumed: 1}  # of a checkpoint that cannot be used; else 2
OF_RUNS = (resumed, initial, evaluated, taught, converted, annotated, replayed, loaded)


def refused(done: kit.Done, reader: Any, names: str) -> None:
    assert done.code == CODES.get(reader, 2), done
    assert names in done.err
    assert "Traceback" not in done.err
    assert not Path("weights.safetensors").exists()
    assert not Path("labelled").exists() or not list(Path("labelled").glob("*.json"))


@pytest.mark.parametrize("function", CODE)
@pytest.mark.parametrize("form", ["archive", "legacy", "pickle"])
def test_these_objects_run_code_where_they_are_trusted(function: str, form: str) -> None:
    data = io.BytesIO(bytes_of(form, Hostile(function)))
    pickle.load(data) if form == "pickle" else torch.load(data, weights_only=False)
    assert Path(CANARY).exists()
    Path(CANARY).unlink()


@pytest.mark.parametrize("reader", OF_RUNS)
def test_a_sealed_run_without_them_is_read(reader: Any, run: Path, runs: Path) -> None:
    for step in (1, 2):
        seal(newest(run, step))
    done = reader(run, runs)
    assert done.code == 0, done
    assert "skipping" not in done.err


@pytest.mark.parametrize(
    ("reader", "way"),
    [
        (reader, way)
        for reader in OF_RUNS
        for way in (WAYS if reader in (resumed, converted, loaded) else FEW)
    ],
)
def test_a_run_with_nothing_but_hostile_checkpoints_is_refused(
    reader: Any, way: str, run: Path, runs: Path
) -> None:
    for step in (1, 2):
        name = WAYS[way](newest(run, step), Hostile(list(CODE)[(len(way) + step) % len(CODE)]))
        seal(newest(run, step))
    refused(reader(run, runs), reader, name)


@pytest.mark.parametrize("function", CODE)
@pytest.mark.parametrize("way", ["the table", "planner_data of the table", "a tensor as archive"])
def test_no_function_is_trusted(way: str, function: str, run: Path, runs: Path) -> None:
    WAYS[way](newest(run), Hostile(function))
    seal(newest(run))
    assert loaded(newest(run), runs).code == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_grounding_model_is_refused_likewise(way: str, runs: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs / "grounding", tmp_path / "run"))
    sa1b.load_grounding(run)
    for step in (1, 2):
        name = WAYS[way](newest(run, step), Hostile("open"))
        seal(newest(run, step))
    refused(loaded(run, runs, sa1b.load_grounding), loaded, name)


@pytest.mark.parametrize("way", [*FEW, "unsealed", "cut", "flipped", "missing", "foreign"])
def test_a_run_goes_on_from_the_checkpoint_before_a_hostile_or_damaged_one(
    way: str, run: Path, runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = newest(run) / "__0_0.distcp"
    if way in WAYS:
        name = WAYS[way](newest(run), Hostile("exec"))
        seal(newest(run))
    else:
        name = the_table(newest(run), Hostile("exec")) if way == "unsealed" else file.name
        if way == "cut":
            os.truncate(file, file.stat().st_size - 1)
        elif way == "flipped":
            kit.flip(newest(run).parent, f"{newest(run).name}/{file.name}")
        elif way == "missing":
            file.unlink()
        elif way == "foreign":
            name = "rng.pt"
            torch.save(Hostile("exec"), newest(run) / name)
    done = resumed(run, runs)
    assert done.code == 0, done
    assert "resuming after step 1 " in done.out
    (skipped,) = (one.getMessage() for one in caplog.records if "skipping" in one.getMessage())
    assert str(newest(run)) in skipped
    assert name in skipped
    numbers = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in numbers if "loss" in line] == [1, 2, 3]


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl"])
def test_a_file_of_a_run_that_is_a_pickle_is_refused_where_the_run_goes_on(
    name: str, run: Path, runs: Path
) -> None:
    (run / "config.json").unlink()  # without it, each file that a run replaces must begin as one of a run
    (run / name).write_bytes(pickle.dumps(Hostile("open")))
    done = resumed(run, runs)
    assert (done.code, name in done.err) == (2, True)


@pytest.mark.parametrize("verb", ["seen", "replay"])
def test_metrics_that_are_a_pickle_are_refused(verb: str, run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(pickle.dumps(Hostile("open")))
    kit.refused(verb, run, *(("--step", 1) if verb == "replay" else ()), names="metrics.jsonl")


@pytest.mark.parametrize("form", ["archive", "legacy", "pickle"])
@pytest.mark.parametrize("reader", OF_RUNS[1:])
def test_a_file_of_weights_is_refused(reader: Any, form: str, runs: Path) -> None:
    weights = sa1b.load_model(runs / "sam").state_dict()
    for name, function in (
        ("weights.pth", "open"),
        ("weights.pt", "os.system"),
        ("weights.safetensors", "of torch"),
    ):
        Path(f"given-{name}").write_bytes(bytes_of(form, {**weights, "extra": Hostile(function)}))
        refused(reader(f"given-{name}", runs), reader, f"given-{name}")


@pytest.mark.parametrize("function", CODE)
def test_no_function_in_a_file_of_weights_is_trusted(function: str, runs: Path) -> None:
    for form in ("archive", "legacy", "pickle"):
        Path("given.pth").write_bytes(bytes_of(form, Hostile(function)))
        refused(loaded("given.pth", runs), loaded, "given.pth")
