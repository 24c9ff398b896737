"""A full disk: the run stops with an error that names a file, and resumes when there is space."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.disks import small_disk
from tests.train.command import checkpoint_steps, losses, newest, start, train_to_end
from tests.train.mishap import Mishap

SIZE = 24 << 20  # bytes of the disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate small file system."""
    with small_disk(tmp_path / "disk", SIZE) as folder:
        yield folder


@pytest.mark.parametrize(
    ("tolerate", "more"),
    [
        (0, ("--checkpoint.no-asynchronous",)),
        pytest.param(
            9, ("--logging.tensorboard", "True", "--logging.profile", "0", "900"), marks=pytest.mark.slow
        ),
    ],
)
def test_all_ranks_stop_and_name_a_file_and_the_remedy_and_the_same_command_goes_on(
    root: Path, whole: Callable[..., Path], disk: Path, tolerate: int, more: tuple[str, ...]
) -> None:
    out = disk / "run"
    flags = ("--checkpoint.tolerate", str(tolerate))
    ended = start(
        root, out, *flags, *more, ranks=2, mode="ddp",
        mishap={"what": "fill", "step": 3, "disk": str(disk)}, model="reconstruction",
    )  # fmt: skip
    assert ended.codes == [1, 1], ended.outputs
    assert "Traceback" not in "".join(ended.outputs)
    last = ended.outputs[0].strip().splitlines()[-1]
    assert last.startswith(f"error on rank 0: {out}/")
    assert "No space left on device" in last
    assert "ree space or repair the disk" in last
    assert newest(out).name in ("step-00000002", "step-00000004")
    (disk / "filler").unlink()
    train_to_end(root, out, *flags, ranks=2, mode="ddp", model="reconstruction")
    assert losses(out) == losses(whole("ddp", 2, "reconstruction"))


def test_lines_of_images_that_are_not_finite_stop_the_run_too(root: Path, disk: Path) -> None:
    out = disk / "run"
    out.mkdir()
    (out / "not-finite.jsonl").mkdir()  # cannot be written, as on a full disk
    mishap = Mishap({"what": "nan", "rank": 1, "step": 1, "times": 1})
    ended = start(root, out, ranks=2, mode="ddp", mishap=mishap, model="reconstruction")
    assert ended.codes == [1, 1], ended.outputs
    assert f"error on rank 1: {out}/not-finite.jsonl: cannot be written (Is a directory)" in ended.outputs[1]
    assert "error on rank 0: --out: another rank cannot write its files" in ended.outputs[0]
    assert checkpoint_steps(out) == [3]
