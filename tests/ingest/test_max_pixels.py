"""Images over the limit: refused with the flag that takes them, and readable everywhere once they are stored."""

import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

import sa1b
from tests import processes
from tests.shards import tiny
from tests.shards.tiny import counts_from, document, encode, pair_members, pairs

REPOSITORY = Path(__file__).parents[2]
HEIGHT, WIDTH = 3000, 6000
PANORAMA = 900


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[:, WIDTH // 2 :] = 200
    image = simplejpeg.encode_jpeg(pixels, 75, "RGB", "420")
    found = document(PANORAMA)
    found["image"] |= {"width": WIDTH, "height": HEIGHT}
    half = HEIGHT * WIDTH // 2
    found["annotations"] = [
        found["annotations"][0]
        | {
            "segmentation": {"size": [HEIGHT, WIDTH], "counts": counts_from([half, half], HEIGHT, WIDTH)},
            "area": half,
            "bbox": [WIDTH / 2, 0.0, WIDTH / 2 - 1.0, HEIGHT - 1.0],
            "crop_box": [0.0, 0.0, float(WIDTH), float(HEIGHT)],
        }
    ]
    members = [*pairs(range(100, 104)), *pair_members(PANORAMA, image, encode(found))]
    return tiny.write_tar(tmp_path_factory.mktemp("panorama") / "sa_000020.tar", members)


@pytest.fixture(scope="module")
def root(source, tmp_path_factory):
    """A dataset that holds the panorama."""
    root = tmp_path_factory.mktemp("root")
    task = tiny.ingest_tar(source, root, max_pixels=HEIGHT * WIDTH)
    assert task.counts["images"] == 5
    assert task.warnings == {}
    return root


def test_a_panorama_is_refused_with_the_flag_that_takes_it(source, tmp_path):
    task = tiny.ingest_tar(source, tmp_path)
    assert task.counts["refused"] == {"absurd_size": 1}
    messages = {line["message"] for line in tiny.lines(tmp_path, task.name)}
    assert messages == {
        f"image of {WIDTH} x {HEIGHT} pixels, cap 16,777,216 in all; --max-pixels 18000000 takes it"
    }


def test_a_smaller_limit_refuses_usual_images_too(tmp_path):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", [*pairs(range(3))])
    with pytest.raises(Exception, match="no usable pair; absurd_size: 3"):
        tiny.ingest_tar(path, tmp_path / "root", max_pixels=tiny.SIZE[0] * tiny.SIZE[1] - 1)


def test_no_flag_is_named_that_would_not_help(tmp_path):
    data = bytearray(simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8), 75))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = (65500).to_bytes(2, "big") * 2
    path = tiny.write_tar(tmp_path / "sa_000020.tar", [*pairs([1]), *pair_members(2, bytes(data))])
    tiny.ingest_tar(path, tmp_path / "root")
    (message,) = {line["message"] for line in tiny.lines(tmp_path / "root", "sa_000020")}
    assert "65500 x 65500 pixels, cap" in message
    assert "--max-pixels" not in message


def test_with_the_flag_it_comes_back_exactly_and_decodes(root):
    stored, found = tiny.read_back(root)[PANORAMA]
    assert found["image"]["width"] == WIDTH
    assert simplejpeg.decode_jpeg(stored).shape == (HEIGHT, WIDTH, 3)
    sample = next(sample for sample in sa1b.open(root) if sample.image_id == PANORAMA)
    assert sample.image.shape == (HEIGHT, WIDTH, 3)
    runs = sample.annotations.runs()
    assert (runs.height, runs.width, len(runs)) == (HEIGHT, WIDTH, 1)


def test_it_is_scaled_down_like_any_other(source, tmp_path):
    tiny.ingest_tar(source, tmp_path, max_pixels=HEIGHT * WIDTH, image_size=512)
    stored, found = tiny.read_back(tmp_path)[PANORAMA]
    assert simplejpeg.decode_jpeg(stored).shape == (256, 512, 3)
    assert found["image"]["width"] == WIDTH


def test_the_stream_decodes_it(root):
    batches = sa1b.Stream(root, global_batch=1, image_size=64, epochs=1)
    (square,) = (batch.images[0] for batch in batches if int(batch.ids[0]) == PANORAMA)
    assert square[:, 10, 10].max() < 20
    assert square[:, 10, 60].min() > 180


@pytest.mark.parametrize(
    "command", [["verify", "--deep"], ["gallery", "--id", str(PANORAMA)]], ids=lambda command: command[0]
)
def test_commands_read_it(root, tmp_path, command):
    tiny.read_back(root)  # the sample table
    arguments = [*command[1:], *(["--out", str(tmp_path / "page.html")] if command[0] == "gallery" else [])]
    done = processes.run(
        [sys.executable, "-m", "sa1b", command[0], str(root), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "absurd" not in done.stdout + done.stderr


@pytest.mark.parametrize("value", ["0", str((1 << 28) + 1)])
def test_the_command_says_which_limits_there_are(source, tmp_path, value):
    done = processes.run(
        [sys.executable, "tools/reshard.py", str(source), "--out", str(tmp_path), "--max-pixels", value],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert ": must be from 1 to 268435456" in done.stderr


def test_the_command_passes_the_limit_on(source, tmp_path):
    done = processes.run(
        [sys.executable, "tools/reshard.py", str(source), "--out", str(tmp_path), "--max-pixels", "18000000"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert PANORAMA in tiny.read_back(tmp_path)
