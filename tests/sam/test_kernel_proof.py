"""Kernels are compared with torch's operators in processes of their own, and used only if they are right."""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sa1b.masks import proved
from sa1b.masks.proved import MASKS, RASTER, RASTER_IN_USE, cache_file, digest, recorded
from sa1b.sam import kernel_proof
from sa1b.sam.image_tokens import IN_USE, kernels_of
from sa1b.sam.kernel_comparison import compared_here
from sa1b.sam.kernel_proof import KERNELS, Kind, prove, prove_for_run, right, use_kernels
from sa1b.sam.model import PRESETS, ModelConfig
from sa1b.sam.recipe import Recipe
from tests.masks.test_raster_triton import python, with_triton

pytestmark = with_triton
KIND, OF_RASTER = Kind("bf16", (256, 0, 64)), Kind(MASKS, ())
# A comparison in place of that of the GPU: its kernel's name decides what happens.
CHILD = """
import json, os, signal, sys, time
case = json.loads(sys.argv[1])
open(os.environ["STARTED"], "a").write(case["kernels"] + chr(10))
if case["kernels"] in os.environ.get("WRONG", "").split():
    print(json.dumps({"right": False, "why": "logits: an error of 0.31, where 0.1 is allowed"})), sys.exit()
if case["kernels"] == os.environ.get("KILLED"): os.kill(os.getpid(), signal.SIGSEGV)
if case["kernels"] == os.environ.get("HANGS"): time.sleep(60)
if case["kernels"] == os.environ.get("RAISES"): raise ImportError("no such module")
print("a warning of a library"), print(json.dumps({"right": True, "why": "", "registers": 168}))
"""
COMMAND = (sys.executable, "-c", CHILD)


@pytest.fixture(autouse=True)
def started(tmp_path, monkeypatch):
    """A GPU, a user's cache and a log of the started comparisons; kernels in use are those of before."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (9, 0))
    monkeypatch.setattr(kernel_proof, "CHILD", COMMAND)
    monkeypatch.setattr(kernel_proof, "_kinds", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    (tmp_path / "started").touch()
    yield lambda: (tmp_path / "started").read_text().split()
    IN_USE.clear()
    RASTER_IN_USE.clear()


def proved_with(known=(), limits=(20, 20), kinds=(KIND, OF_RASTER)):
    return prove(kinds, dict(known), COMMAND, [x / 4 for x in limits])


def run_of(folder, **model):
    parallel = SimpleNamespace(precision="bf16")
    return SimpleNamespace(folder=folder, parallel=parallel, recipe=Recipe(), model=ModelConfig(**model))


def model_on_a_gpu():
    weight = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=torch.device("cuda", 0))
    tokens = SimpleNamespace(mask_tokens=SimpleNamespace(weight=weight))
    return SimpleNamespace(config=ModelConfig(), mask_decoder=tokens)


def test_in_the_interpreter_the_comparison_finds_kernels_that_are_wrong_and_no_others():
    assert python("-m", "tests.sam.kernel_proof_cases", "upscale", TRITON_INTERPRET="1") == "6 comparisons\n"


def test_a_kernel_that_is_wrong_dies_or_hangs_is_not_used_and_the_others_are(monkeypatch, started, capsys):
    for name, kernels in {"WRONG": "norm", "KILLED": "upscale", "HANGS": "losses", "RAISES": "fill"}.items():
        monkeypatch.setenv(name, kernels)
    results = proved_with(limits=(12, 40))
    found = KIND.found(results)
    assert right(found) == {"downscale", "image_to_tokens", "tokens_to_image"}
    assert found["norm"]["why"] == "logits: an error of 0.31, where 0.1 is allowed"
    assert found["upscale"]["why"] == "ended by SIGSEGV"
    assert found["losses"]["why"] == "the comparison did not end in time"
    assert found["downscale"]["registers"] == 168
    of_raster = OF_RASTER.found(results)
    assert of_raster["fill"]["why"] == "ended with exit code 1: ImportError: no such module"
    assert right(of_raster) == {"measure_masks"}
    together = "downscale+image_to_tokens+tokens_to_image"
    assert sorted(started()) == sorted((*KERNELS, *RASTER, together))
    assert "comparing 8 kernels with torch on this GPU, once: 8 of 8" in capsys.readouterr().err
    assert recorded() == results
    assert proved_with(recorded()) == results
    assert len(started()) == 9


def test_kernels_that_are_wrong_together_are_not_used(monkeypatch):
    monkeypatch.setenv("WRONG", "+".join(KERNELS))
    found = KIND.found(proved_with())
    assert all(found[name]["right"] for name in KERNELS)
    assert right(found) == set()


@pytest.mark.parametrize("what", ["no folder", "full disk"])
def test_without_a_cache_the_comparison_still_counts_for_the_run(
    monkeypatch, tmp_path, caplog, what, started
):
    if what == "no folder":
        (tmp_path / "cache").write_text("a file")
    else:
        monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(28, "No space left on device")))
    prove_for_run(run_of(tmp_path / "run"), torch.device("cuda", 0), 0)
    assert "the kernels may be compared again, because the results cannot be kept" in caplog.text
    use = {kind: names for kind, names in kernel_proof._kinds.items() if kind == KIND}
    assert use == {KIND: set(KERNELS)}
    if what == "no folder":
        monkeypatch.setattr(kernel_proof, "_kinds", {})
        prove_for_run(run_of(tmp_path / "run"), torch.device("cuda", 0), 0)  # by OUT/kernels.json
        assert len(started()) == 9


def test_two_runs_that_start_at_once_keep_the_results_of_both():
    other = Kind("fp32", (256, 0, 64))
    proved.digest("sam/*_triton.py")  # Python 3.11 cannot parse in two threads; runs are processes
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda kind: proved_with(kinds=(kind,)), (KIND, other)))
    assert recorded() == found[0] | found[1]


def test_another_gpu_triton_format_or_size_is_compared_again(monkeypatch, started):
    import triton

    known = proved_with(kinds=(OF_RASTER,))
    assert len(started()) == 2
    for change in (
        lambda: monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA A100"),
        lambda: monkeypatch.setattr(triton, "__version__", "3.0.0"),
        lambda: monkeypatch.setattr(proved, "digest", lambda pattern: "other"),
    ):
        change()
        proved._assembled_by.cache_clear()
        before = len(started())
        known |= proved_with(known, kinds=(OF_RASTER,))
        assert len(started()) == before + 2
    proved._assembled_by.cache_clear()
    monkeypatch.undo()
    proved._assembled_by.cache_clear()


def test_the_digest_of_the_source_ignores_comments_and_docstrings(monkeypatch, tmp_path):
    shutil.copytree(Path(proved.__file__).parents[1] / "sam", tmp_path / "sam")
    monkeypatch.setattr(proved, "__file__", str(tmp_path / "masks" / "proved.py"))
    path, found = tmp_path / "sam" / "norm_triton.py", []
    for change in (lambda text: text, lambda text: f"{text}# more\n", lambda text: f"{text}MORE = 1\n"):
        path.write_text(change(path.read_text()))
        digest.cache_clear()
        found.append(digest("sam/*_triton.py"))
    digest.cache_clear()
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("what", ["same", "wrong on one", "other GPU"])
def test_a_kernel_is_used_if_it_is_right_on_all_machines(monkeypatch, tmp_path, what):
    def gather(everyone, mine):  # rank 1 is the first of another machine, rank 2 its second
        keys, used, _ = mine
        used = used - {"norm"} if what == "wrong on one" else used
        everyone[:] = [mine, (keys, used, {}), (keys if what != "other GPU" else {"its key"}, None, {})]

    for name, function in {
        "is_initialized": lambda: True,
        "get_world_size": lambda: 3,
        "get_rank": lambda: 0,
    }.items():
        monkeypatch.setattr(dist, name, function)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    prove_for_run(run_of(tmp_path), torch.device("cuda", 0), 0)
    left_out = {"same": set(), "wrong on one": {"norm"}, "other GPU": set(KERNELS)}[what]
    assert kernel_proof._kinds[KIND] == set(KERNELS) - left_out
    assert json.loads((tmp_path / "kernels.json").read_text())["kernels"] == recorded()


def test_without_a_run_the_result_in_the_users_file_counts(caplog):
    with torch.autocast("cpu"):
        use_kernels(model_on_a_gpu())
    assert not IN_USE
    assert "`sa1b doctor --kernels` compares them" in caplog.text
    kernel_proof._kinds.clear()
    proved_with(kinds=(Kind("fp32", (256, 0, 64)),))
    use_kernels(model_on_a_gpu())
    assert set(KERNELS) == IN_USE
    on_a_gpu = SimpleNamespace(is_cuda=True)
    assert kernels_of("norm", on_a_gpu) is not None
    IN_USE.discard("norm")
    assert kernels_of("norm", on_a_gpu) is None


@pytest.mark.parametrize(("kernels", "used"), [("none", set()), ("all", {*KERNELS})])
def test_the_flag_leaves_out_or_uses_all_without_a_comparison(tmp_path, caplog, started, kernels, used):
    prove_for_run(run_of(tmp_path, kernels=kernels), torch.device("cuda", 0), 0)
    assert (kernel_proof._kinds[KIND], RASTER_IN_USE[MASKS], started()) == (used, bool(used), [])
    assert ("right on this GPU or not" in caplog.text) == bool(used)


def test_on_a_cpu_nothing_is_compared_or_printed(tmp_path, capsys, caplog, started):
    prove_for_run(run_of(tmp_path), torch.device("cpu"), 0)
    assert (started(), caplog.text, *capsys.readouterr()) == ([], "", "", "")
    assert not cache_file().exists()


@pytest.mark.gpu
@pytest.mark.parametrize("number_format", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("preset", ["tiny", "vit_b"])
def test_every_kernel_is_right_on_this_gpu(preset, number_format):
    kind = Kind(number_format, kernel_proof.sizes_of(PRESETS[preset]))
    results = {name: compared_here(name, kind) for name in KERNELS}
    results |= {name: compared_here(name, OF_RASTER) for name in RASTER}
    assert {name: result["why"] for name, result in results.items() if not result["right"]} == {}
