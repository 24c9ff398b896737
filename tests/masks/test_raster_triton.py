"""The Triton back end equals the CPU back end, in Triton's interpreter and, if there is one, on a GPU."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sa1b.masks import raster_torch
from tests import processes
from tests.masks.samples import examples, pixel_masks, to_runs
from tests.masks.triton_cases import DTYPES, check_case, check_odd_cases, draw_masks, join

ROOT = Path(__file__).parents[2]

with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed",
)


def python(*arguments, **environment):
    options = {"cwd": ROOT, "env": {**os.environ, **environment}, "timeout": 900}
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@with_triton
@pytest.mark.parametrize(("first", "stop"), [(0, 1), pytest.param(1, 200, marks=pytest.mark.slow)])
def test_the_interpreter_gives_the_bits_of_the_cpu(first, stop):
    told = python("-m", "tests.masks.triton_cases", str(first), str(stop), TRITON_INTERPRET="1")
    assert "cases" in told


@with_triton
def test_tensors_on_the_cpu_are_refused():
    from sa1b.masks import raster_triton

    with pytest.raises(ValueError, match="must be on a CUDA device for the Triton kernels, got cpu"):
        raster_triton.rasterize(torch.tensor([3, 9]), torch.tensor([0, 2]), 3, 4, 3, 4)


@with_triton
def test_both_back_ends_take_the_same_arguments():
    from sa1b.masks import raster_triton

    for name in ("rasterize", "rasterize_frame"):
        first, second = (inspect.signature(getattr(one, name)) for one in (raster_triton, raster_torch))
        assert first == second


def test_without_triton_the_import_says_what_to_install():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "try: import sa1b.masks.raster_triton\n"
        "except ImportError as error: print(error)\n"
    )
    done = processes.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install 'sa1b[kernels]'" in done.stdout


@examples
@given(pixel_masks(), st.integers(1, 70), st.integers(1, 70), st.sampled_from(DTYPES), st.data())
def test_plain_torch_flips_and_takes_every_dtype(masks, height, width, dtype, data):
    batch = join([to_runs(masks)])
    flip = np.array(data.draw(st.lists(st.booleans(), min_size=len(masks), max_size=len(masks))), np.bool_)
    runs = torch.from_numpy(batch.runs.astype(np.int64)), torch.from_numpy(batch.offsets)
    for name in ("rasterize", "rasterize_frame"):
        for chosen, given_as in ((flip, torch.from_numpy(flip)), (True, True)):
            got = getattr(raster_torch, name)(
                *runs, *masks.shape[1:], height, width, flip=given_as, dtype=dtype
            )
            assert got.dtype == dtype
            np.testing.assert_array_equal(got.float(), batch.expected(name, (height, width), chosen))


# The tests below need a GPU and run compiled kernels.


@pytest.fixture
def raster_triton(monkeypatch):
    from sa1b.masks import raster_triton

    for name in ("TILE_ROWS", "TILE_COLUMNS", "STEP_PIXELS", "RUNS_BLOCK"):
        monkeypatch.setattr(raster_triton, name, getattr(raster_triton, name))  # cases change them
    return raster_triton


@pytest.fixture(scope="module")
def large():
    """Masks of two images at SA-1B's size: outlines, noise, stripes, empty, full."""
    rng, images = np.random.default_rng(3), []
    for height, width in ((1500, 2250), (2250, 1500)):
        y, x = np.mgrid[:height, :width]
        masks = [np.hypot(x - a, 2 * (y - b)) < r for a, b, r in rng.uniform(50, 1400, (20, 3))]
        masks += [rng.random((height, width)) < 0.2, y % 2 == 0, x % 2 == 0, y < 0, y >= 0, y == height - 1]
        images.append(to_runs(np.stack(masks)))
    return join(images)


@pytest.mark.gpu
@with_triton
@pytest.mark.parametrize("first", range(0, 150, 30))  # a case may compile a kernel, in one thread
def test_compiled_gives_the_bits_of_the_cpu(raster_triton, first):
    for seed in range(first, first + 30):
        check_case(seed, "cuda", tiles=((16, 32, 256),))


@pytest.mark.gpu
@with_triton
def test_compiled_handles_odd_cases(raster_triton):
    check_odd_cases("cuda", 100_000)


@pytest.mark.gpu
@with_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_masks_at_training_sizes(raster_triton, large, dtype):
    runs, offsets = torch.from_numpy(large.runs).cuda(), torch.from_numpy(large.offsets).cuda()
    sources = torch.from_numpy(large.heights).cuda(), torch.from_numpy(large.widths).cuda()
    on_cpu = [side.cpu() for side in (runs.long(), offsets, *sources)]
    flip = torch.arange(len(large)) % 3 == 0
    cases = ("rasterize_frame", (1024, 1024)), ("rasterize_frame", (1024, 256)), ("rasterize", (683, 1030))
    for name, sizes in cases:
        expected = getattr(raster_torch, name)(*on_cpu, *sizes, flip=flip).cuda()
        out = torch.full(expected.shape, 1, dtype=dtype, device="cuda")
        getattr(raster_triton, name)(runs, offsets, *sources, *sizes, flip=flip.cuda(), out=out)
        assert torch.equal(out, expected.to(dtype))


@pytest.mark.gpu
@with_triton
def test_a_raster_of_more_than_2_to_the_32_pixels(raster_triton):
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB on the GPU")
    batch = join([to_runs(draw_masks(np.random.default_rng(4), 40, 60, 43))])
    times = 100  # 4300 masks of 1024 x 1024
    ends = [batch.offsets[1:] + i * len(batch.runs) for i in range(times)]
    runs = torch.from_numpy(np.tile(batch.runs, times)).cuda()
    offsets = torch.from_numpy(np.concatenate([[0], *ends])).cuda()
    expected = torch.from_numpy(batch.expected("rasterize", (1024, 1024), False)).cuda()
    out = torch.full((43 * times, 1024, 1024), 9, dtype=torch.uint8, device="cuda")
    raster_triton.rasterize(runs, offsets, 40, 60, 1024, 1024, out=out)
    assert all(torch.equal(part, expected) for part in out.view(times, 43, 1024, 1024))


@pytest.mark.gpu
@with_triton
def test_nothing_waits_for_the_device_and_a_graph_can_hold_the_call(raster_triton, large):
    runs, offsets = torch.from_numpy(large.runs).cuda(), torch.from_numpy(large.offsets).cuda()
    sources = torch.from_numpy(large.heights).cuda(), torch.from_numpy(large.widths).cuda()
    flip = torch.zeros(len(large), dtype=torch.bool, device="cuda")
    out = torch.empty((len(large), 256, 256), dtype=torch.uint8, device="cuda")

    def call():
        return raster_triton.rasterize_frame(runs, offsets, *sources, 1024, 256, flip=flip, out=out)

    expected = call().clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        out.fill_(9)
        graph.replay()
        assert torch.equal(out, expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out.fill_(9)
        call()
    side.synchronize()
    assert torch.equal(out, expected)
