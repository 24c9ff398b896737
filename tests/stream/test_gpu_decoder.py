"""Decoding on a GPU: with stand-ins on the CPU that have the faults of JPEG engines."""

import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
from torch import Tensor

import sa1b
from benchmarks.gpu.stand_in import HostLane
from sa1b.errors import BadSample, UsageError
from sa1b.stream import decode, decoders
from sa1b.stream.decode import CpuDecoder, EncodedImage, paint
from sa1b.stream.decoders import LANES, POISON, DecoderError, GpuDecoder, without_exif, written
from sa1b.stream.plan import ResumeError
from sa1b.stream.transform import Frame
from tests.stream.late_lane import LateLane
from tests.stream.recorded import make_root
from tests.stream.test_side_stream import LateStream, late  # noqa: F401  (a fixture)
from tests.stream.test_stream import SMALL, assert_equal, take

S = 32
BRIGHTNESS = torch.tensor([0.299, 0.587, 0.114])[:, None, None]  # of red, green, blue


def smooth(height: int, width: int, number: int = 0) -> np.ndarray:
    """An image without noise, so that ways of resizing give about the same pixels."""
    coarse = np.random.default_rng(number).integers(0, 256, (5, 6, 3), np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)


def jpeg(height: int = 60, width: int = 80, number: int = 0) -> bytes:
    return bytes(simplejpeg.encode_jpeg(smooth(height, width, number), 95, "RGB", "420", False))


def whole(file: bytes, **changes: Any) -> EncodedImage:
    height, width = simplejpeg.decode_jpeg_header(file)[:2]
    return EncodedImage(file, replace(Frame.whole_image(height, width, S), **changes))


def on_cpu(images: Sequence[EncodedImage]) -> Tensor:
    out = torch.empty((len(images), S, S, 3), dtype=torch.uint8)
    CpuDecoder().decode(images, out)
    return out


class Faulty(HostLane):
    """Faults by the first byte of the comment of a file.

    s: reports success, writes nothing. h: writes the upper half only. o: output in other memory. w: another
    size. r: fails, and with it the whole call.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.calls: list[int] = []

    def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
        self.calls.append(len(files))
        return super().decode(files)

    def image(self, file: bytes) -> Tensor:
        height, width = simplejpeg.decode_jpeg_header(file)[:2]
        fault = fault_of(file)
        if fault == "r":
            raise RuntimeError("Failed to decode batch: 2")
        if fault in "sh":
            kept = self.allocate((3, height, width))
            if fault == "h":
                pixels = torch.from_numpy(simplejpeg.decode_jpeg(file, "RGB")).permute(2, 0, 1)
                kept[:, : height // 2] = pixels[:, : height // 2]
            return kept
        if fault == "o":
            return torch.zeros((3, height, width), dtype=torch.uint8)
        image = super().image(file)
        return image[:, 1:] if fault == "w" else image


def with_fault(fault: str, file: bytes) -> bytes:
    comment = b"\xff\xfe\x00\x03" + fault.encode()
    return file[:2] + comment + file[2:]


def fault_of(file: bytes) -> str:
    return chr(file[6]) if file[2:4] == b"\xff\xfe" else "-"


class Made:
    """A decoder with stand-ins, and what it made."""

    def __init__(self, lane: type[HostLane] = Faulty) -> None:
        self.lanes: list[Any] = []

        def new_lane(device: torch.device) -> HostLane:
            self.lanes.append(lane(device))
            return self.lanes[-1]

        self.decoder = GpuDecoder(new_lane, "cpu")


def decoded(decoder: GpuDecoder, images: Sequence[EncodedImage]) -> tuple[Tensor, list[BadSample | None]]:
    out = torch.full((len(images), S, S, 3), 7, dtype=torch.uint8)
    return out, decoder.decode(images, out)


def assert_alike(one: Tensor, other: Tensor, most: float = 3.0) -> None:
    """Resizing differs from that of the CPU, but not by half a pixel."""
    assert (one.float() - other.float()).abs().mean() < most
    assert torch.equal(one.any(-1), other.any(-1))


@pytest.mark.parametrize(
    ("height", "width", "stored"),
    [(60, 80, (60, 80)), (80, 60, (80, 60)), (32, 32, (32, 32)), (200, 300, (40, 60)), (20, 24, (20, 24))],
    ids=["wide", "high", "size of the square", "stored smaller", "enlarged"],
)
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("cut", [False, True])
def test_images_are_cut_resized_mirrored_and_padded_as_on_the_cpu(
    height: int, width: int, stored: tuple[int, int], flip: bool, cut: bool
) -> None:
    frame = replace(Frame.whole_image(height, width, S), flip=flip)
    if cut:
        frame = frame.crop(width // 5, height // 7, width // 3, height // 2)
    image = EncodedImage(jpeg(*stored), frame)
    out, errors = decoded(Made().decoder, [image])
    assert errors == [None]
    assert_alike(out, on_cpu([image]))


def test_an_image_of_the_size_of_the_square_is_not_resized() -> None:
    file = jpeg(S, S)
    out, _ = decoded(Made().decoder, [whole(file)])
    assert torch.equal(out[0], torch.from_numpy(simplejpeg.decode_jpeg(file, "RGB")))


def test_reduction_averages_all_pixels() -> None:
    """Bilinear interpolation without antialiasing would read every fourth pixel only."""
    stripes = np.zeros((128, 128, 3), np.uint8)
    stripes[:, ::4] = 255
    target = torch.empty((S, S, 3), dtype=torch.uint8)
    paint(torch.from_numpy(stripes), (128, 128), Frame.whole_image(128, 128, S), target)
    assert (target[:, 2:-2].float() - 255 / 4).abs().max() < 6


def test_a_function_of_pixels_gets_the_mirrored_image_without_padding() -> None:
    seen = []

    def inverted(image: np.ndarray) -> np.ndarray:
        seen.append(image.copy())
        return 255 - image[:, ::-1]

    image = whole(jpeg(), flip=True, pixels=inverted)
    out, _ = decoded(Made().decoder, [image, whole(jpeg(), flip=True)])
    assert np.array_equal(seen[0], out[1, :24].numpy())
    assert torch.equal(out[0, :24], 255 - out[1, :24].flip(1))
    assert not out[0, 24:].any()


@pytest.mark.parametrize("fault", ["s", "h", "o", "w", "r"])
def test_an_image_that_the_library_did_not_decode_is_decoded_on_the_cpu(fault: str) -> None:
    made = Made()
    images = [whole(jpeg(number=0)), whole(with_fault(fault, jpeg(number=1))), whole(jpeg(72, 80, number=2))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out, errors = decoded(made.decoder, images)
    assert errors == [None, None, None]
    assert torch.equal(out[1], on_cpu(images)[1])
    assert_alike(out, on_cpu(images))
    skipped = fault in "sh"
    assert made.decoder.counts == {"gpu": 2, "skipped" if skipped else "refused": 1}
    assert [str(one.message).split(".")[0] for one in caught] == skipped * [
        "torchcodec reported success for an image that it had not decoded"
    ]


def test_a_file_that_fails_does_not_take_the_others_of_the_batch_with_it() -> None:
    made = Made()
    broken = jpeg(number=1)[:-200] + b"\xff\xd9"  # the header is complete, the end marker is there
    images = [whole(jpeg()), whole(broken), whole(jpeg(number=2))]
    out, errors = decoded(made.decoder, images)
    assert [type(error) for error in errors] == [type(None), BadSample, type(None)]
    assert_alike(out[::2], on_cpu(images)[::2])
    assert made.lanes[0].calls == [1, 3, 1, 1, 1]  # the test image, the batch, each file alone


@pytest.mark.parametrize(
    "file",
    [
        jpeg(12, 200),
        jpeg() + b"\0\0",
        jpeg()[:-2],
        bytes(simplejpeg.encode_jpeg(np.full((60, 80, 4), 9, np.uint8), 90, "CMYK", "444", False)),
        b"no JPEG",
        jpeg(600, 800),
    ],
    ids=["small", "bytes after the end", "no end", "CMYK", "not a JPEG", "reduced by 25"],
)
def test_what_libraries_decode_differently_never_reaches_them(file: bytes) -> None:
    made = Made()
    frame = Frame.whole_image(60, 80, S)
    images = [whole(jpeg()), EncodedImage(file, frame)]
    out, errors = decoded(made.decoder, images)
    expected = torch.empty_like(out[1:])
    (error,) = CpuDecoder().decode(images[1:], expected)
    assert (type(errors[1]), str(errors[1])) == (type(error), str(error))
    if error is None:
        assert torch.equal(out[1:], expected)
    assert made.decoder.counts == {"gpu": 1, "cpu": 1}


def test_the_orientation_of_exif_does_not_turn_an_image() -> None:
    plain = jpeg()
    exif = b"\xff\xe1" + (2 + 6 + 26).to_bytes(2, "big") + b"Exif\0\0" + bytes(26)
    other = b"\xff\xe1\x00\x05abc"  # XMP is an APP1 segment too
    file = plain[:2] + exif + other + b"\xff" + exif + plain[2:]
    assert b"".join(without_exif(memoryview(file))) == plain[:2] + other + b"\xff" + plain[2:]
    assert b"".join(without_exif(plain)) == plain
    assert b"".join(without_exif(file[:30])) == file[:2]
    seen = []

    class Seeing(HostLane):
        def image(self, file: bytes) -> Tensor:
            seen.append(file)
            return super().image(file)

    decoded(Made(Seeing).decoder, [whole(file)])
    assert b"Exif" not in seen[-1]


def test_memory_that_queued_work_still_uses_is_not_overwritten() -> None:
    """The engine writes at once; resizing, and filling memory, happen when the host waits."""
    made = Made(LateLane)
    batches = [[whole(jpeg(number=3 * n + k)) for k in range(3)] for n in range(4)]
    outs = [decoded(made.decoder, images)[0] for images in batches]
    (lane,) = made.lanes
    lane.synchronize()
    for images, out in zip(batches, outs, strict=True):
        assert_alike(out, on_cpu(images))
    assert made.decoder.counts == {"gpu": 12}


def test_the_stand_in_shows_the_fault_where_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(LateLane)
    images = [[whole(jpeg(number=n))] for n in (0, 1)]
    decoded(made.decoder, images[0])
    (lane,) = made.lanes
    monkeypatch.setattr(LateLane, "run", lambda _: None)
    outs = [decoded(made.decoder, one)[0] for one in images]
    monkeypatch.undo()
    lane.synchronize()
    assert (outs[0].float() - on_cpu(images[0]).float()).abs().mean() > 10


def test_a_lane_is_used_by_one_thread_at_a_time() -> None:
    together: list[int] = []

    class Exclusive(HostLane):
        busy = False

        def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
            assert not self.busy
            self.busy = True
            together.append(sum(one.busy for one in made.lanes))
            time.sleep(0.01)
            found = super().decode(files)
            self.busy = False
            return found

    made = Made(Exclusive)
    files = [jpeg(number=n) for n in range(6)]
    found: dict[int, Tensor] = {}

    def work(n: int) -> None:
        found[n] = decoded(made.decoder, [whole(files[n])])[0]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(6):
        assert_alike(found[n], on_cpu([whole(files[n])]))
    assert len(made.lanes) <= LANES
    assert max(together) <= LANES


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), MemoryError("no memory")])
def test_what_is_no_fault_of_a_file_is_raised(error: Exception) -> None:
    made = Made()
    decoded(made.decoder, [whole(jpeg())])

    def fails(*_: Any, **__: Any) -> None:
        raise error

    made.lanes[0].image = fails
    with pytest.raises(type(error)):
        decoded(made.decoder, [whole(jpeg()), whole(jpeg())])
    del made.lanes[0].image
    assert decoded(made.decoder, [whole(jpeg())])[1] == [None]  # its lane is free again


@pytest.mark.parametrize("fault", ["r", "o", "b"])
def test_a_library_that_decodes_nothing_is_refused_at_once(fault: str) -> None:
    class Useless(Faulty):
        def image(self, file: bytes) -> Tensor:
            image = super().image(with_fault(fault, file))
            return 255 - image if fault == "r" else image.fill_(99) if fault == "b" else image

    with pytest.raises(DecoderError) as error:
        decoded(Made(Useless).decoder, [whole(jpeg())])
    assert str(error.value) == (
        "decoder='torchcodec' on cpu: does not decode a test image (no image, or wrong pixels); update "
        "torchcodec and the driver, or decode on the CPU: decode='cpu'"
    )


def test_a_library_without_support_for_the_gpu_is_refused_with_its_reason() -> None:
    class Unsupported(HostLane):
        def decode(self, files: Sequence[Tensor]) -> list[Tensor]:
            raise ValueError("Could not create decoder. Code: 4\nin line 7")

    with pytest.raises(DecoderError, match=r"test image \(Could not create decoder. Code: 4\)"):
        decoded(Made(Unsupported).decoder, [whole(jpeg())])


def test_corners_and_centre_are_checked() -> None:
    image = torch.zeros((40, 50, 3), dtype=torch.uint8)
    parts = [(0, 0), (0, 42), (32, 0), (32, 42), (16, 21)]
    images = [image.clone() for _ in parts]
    for (top, left), one in zip(parts, images, strict=True):
        one[top : top + 8, left : left + 8] = POISON
    inner = image.clone()
    inner[8:16] = POISON
    assert written([*images, None, inner, image]) == [False] * 6 + [True, True]
    assert written([None]) == [False]


def test_without_torchcodec_the_message_says_what_to_install(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders._gpu_decoder.cache_clear()
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    with pytest.raises(ValueError, match="decode='gpu': needs") as error:
        sa1b.Stream(root, global_batch=2, decoder="torchcodec")
    assert str(error.value) == (
        "decode='gpu': needs torchcodec 0.16 or later (import of torchcodec.decoders halted; None in "
        "sys.modules); pip install 'sa1b[gpu]', or pass decode='cpu'"
    )
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", ModuleType("torchcodec.decoders"))
    with pytest.raises(ValueError, match=r"needs torchcodec 0.16 or later \(.* no attribute 'decode_jpeg'\)"):
        sa1b.Stream(root, global_batch=2, decoder="torchcodec")


def test_all_streams_of_a_process_share_a_decoder_and_so_its_cuda_streams(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("torchcodec.decoders")
    monkeypatch.setattr(library, "decode_jpeg", print, raising=False)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", library)
    decoders._gpu_decoder.cache_clear()
    streams = [sa1b.Stream(root, global_batch=2, decoder="torchcodec") for _ in range(2)]
    decoders._gpu_decoder.cache_clear()
    assert isinstance(streams[0].decoder, GpuDecoder)
    assert (streams[0].decoder.batched, streams[0].decoder.device.type) == (True, "cuda")
    assert streams[0].decoder is streams[1].decoder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("gpu_decoder"), 17)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, late: Any) -> list[Made]:  # noqa: F811
    """The decoder "torchcodec" with stand-ins, for a loader with device="cuda"."""
    mades: list[Made] = []

    def make() -> GpuDecoder:
        mades.append(Made(LateLane))
        mades[-1].decoder.device = torch.device("cuda")
        return mades[-1].decoder

    def empty(_: LateStream, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, 0xEE, dtype=torch.uint8)

    monkeypatch.setattr(LateStream, "empty", empty, raising=False)
    monkeypatch.setitem(decoders.DECODERS, "torchcodec", make)
    return mades


def stream(root: Path, **options: Any) -> sa1b.Stream:
    step: dict[str, Any] = {"global_batch": 6, "micro_batch": 3, "epochs": None}
    return sa1b.Stream(root, damage_log=root / "log.jsonl", **step, **SMALL, **options)


def test_a_loader_decodes_on_the_gpu_and_the_state_says_so(root: Path, gpu: list[Made]) -> None:
    loader = sa1b.Loader(stream(root), threads=3, device="cuda", decode="gpu", quiet=True)
    batches = iter(loader)
    own = [next(batches) for _ in range(6)]
    batches.close()
    (made,) = gpu
    for lane in made.lanes:
        lane.synchronize()
    (side,) = LateStream.made
    side.run(len(side.copies))
    for batch, expected in zip(own, take(stream(root), 6), strict=True):
        assert_alike(batch.images.permute(0, 2, 3, 1), expected.images.permute(0, 2, 3, 1), 3)
        assert_equal(replace(batch, images=expected.images, buffer=None), expected)
    assert made.decoder.counts["gpu"] >= 18
    state = loader.state_dict()
    assert state["options"]["decoder"] == "torchcodec-2"
    resumed = sa1b.Loader(stream(root), quiet=True)
    with pytest.warns(
        UserWarning, match="decoder torchcodec-2, now cpu-2. The sequence of images is the same"
    ):
        resumed.load_state_dict(state)
    again = sa1b.Loader(stream(root), device="cuda", decode="gpu", quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(state)


def test_a_state_of_a_decoder_that_is_gone_is_refused(root: Path) -> None:
    state = stream(root).state_dict()
    state["options"]["decoder"] = "nvimgcodec-2"
    with pytest.raises(ResumeError) as error:
        stream(root).load_state_dict(state)
    assert str(error.value) == (
        "saved state with the decoder nvimgcodec-2, which this version does not have: the pixels differ; begin "
        "again from its weights with decode='gpu', which is torchcodec, or set the state's options['decoder'] "
        "to 'torchcodec-2' to go on with the same images and other pixels"
    )
    state["options"]["decoder"] = "torchcodec-2"
    with pytest.warns(UserWarning, match="decoder torchcodec-2, now cpu-2"):
        stream(root).load_state_dict(state)


def test_auto_keeps_the_decoder_of_the_stream(root: Path, gpu: list[Made]) -> None:
    assert sa1b.Loader(stream(root), device="cuda", quiet=True).stream.options.decoder == "cpu"
    named = stream(root, decoder="torchcodec")
    for choice, expected in (("auto", "torchcodec"), ("gpu", "torchcodec"), ("cpu", "cpu")):
        loader = sa1b.Loader(named, device="cuda", decode=choice, quiet=True)
        assert loader.state_dict()["options"]["decoder"] == f"{expected}-2"
    assert len(gpu) == 1


def test_the_memory_line_names_the_decoder(
    root: Path, gpu: list[Made], said: pytest.LogCaptureFixture
) -> None:
    sa1b.Loader(stream(root), threads=2, device="cuda", decode="gpu")
    line = said.messages[-1]
    assert "on the device for images, decoded there by torchcodec" in line
    assert "pinned" not in line


def test_what_cannot_be_decoded_is_logged_and_replaced(
    root: Path, gpu: list[Made], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library refuses one image, and the CPU too."""
    damaged = bytes(sa1b.open(root)[2].jpeg)
    own = sa1b.Stream(
        root, global_batch=6, micro_batch=3, epochs=None, damage_log=tmp_path / "log.jsonl", **SMALL
    )
    correct = HostLane.image

    def refusing(self: HostLane, file: bytes) -> Tensor:
        if file == damaged:
            raise RuntimeError("Failed to decode batch: 5")
        return correct(self, file)

    def decode_all_but_one(file: Any, *arguments: Any, whole: Any = decode.decode) -> None:
        if bytes(file) == damaged:
            raise BadSample("jpeg_broken", "no luck")
        whole(file, *arguments)

    monkeypatch.setattr(HostLane, "image", refusing)
    monkeypatch.setattr("sa1b.stream.decode.decode", decode_all_but_one)
    batches = iter(sa1b.Loader(own, threads=3, device="cuda", decode="gpu", quiet=True))
    found = [next(batches) for _ in range(6)]
    batches.close()
    wanted = sa1b.open(root)[2].image_id
    assert wanted not in torch.cat([batch.ids for batch in found])
    assert {line["image_id"] for line in own.damage_log.entries()} == {wanted}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decode": "nvjpeg"}, "decode='nvjpeg' must be one of 'auto', 'cpu', 'gpu'"),
        ({"decode": "gpu"}, "decode='gpu': decodes into memory of a GPU, not of cpu; pass device='cuda'"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(root: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sa1b.Loader(stream(root), quiet=True, **arguments)


def test_worker_processes_cannot_decode_on_a_gpu(root: Path, gpu: list[Made]) -> None:
    own = stream(root, decoder="torchcodec")
    with pytest.MonkeyPatch.context() as patch:
        info: Callable[[], Any] = lambda: SimpleNamespace(id=0, num_workers=2)  # noqa: E731
        patch.setattr("sa1b.stream.batch_stream.get_worker_info", info)
        with pytest.raises(
            UsageError, match=r"decoder='torchcodec': decodes on a GPU, which worker processes"
        ):
            iter(own)


@pytest.mark.gpu
def test_a_gpu_decodes_the_images_of_the_cpu(root: Path) -> None:
    try:
        own = stream(root, decoder="torchcodec")
    except ValueError as error:
        pytest.skip(str(error))
    loader = sa1b.Loader(own, threads=3, device="cuda", dense=S, quiet=True)
    for batch, expected in zip(loader, take(stream(root), 14), strict=False):
        # The brightness: these images are noise, and torchcodec repeats chroma where the CPU interpolates.
        differ = (batch.images.cpu().float() - expected.images.float()) * BRIGHTNESS
        assert differ.sum(1).abs().mean() < 4
        assert torch.equal(batch.dense.cpu(), expected.masks.dense(S))
        moved = replace(batch, dense=None).to("cpu")
        assert_equal(replace(moved, buffer=None, images=expected.images), expected)
    assert set(own.decoder.counts) == {"gpu"}
