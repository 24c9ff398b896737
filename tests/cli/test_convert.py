import json
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch.optim import AdamW

import sa1b
from sa1b.engine.checkpoint.checkpoints import Checkpoints
from sa1b.engine.settings import CheckpointConfig
from sa1b.errors import CheckpointError, Sa1bError, UsageError
from sa1b.recipes.conversion import convert
from sa1b.recipes.weights import find_weights
from sa1b.sam.interactive import Interactive
from sa1b.sam.model import PRESETS, ModelConfig, Sam
from sa1b.sam.published import read_weights, write_weights
from sa1b.sam.recipe import Recipe
from tests.cli.verb import runner
from tests.sam.published import stand_ins

SMALL = ModelConfig(image_size=32, width=16, depth=1, heads=2, global_blocks=(0,), window=2, channels=32)


run = runner("convert")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with two checkpoints, and the weights in each."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    module = Interactive(Sam(SMALL), Recipe())
    optimizer = AdamW(module.parameters())
    checkpoints = Checkpoints(folder, CheckpointConfig())
    weights = {}
    for step in (10, 20):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(step)
        weights[step] = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
        checkpoints.save(step, module, optimizer, {})
    checkpoints.close()
    return folder, weights


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_becomes_one_file_and_files_become_each_other(trained, tmp_path):
    folder, weights = trained
    safetensors, pth = tmp_path / "sam.safetensors", tmp_path / "sam.pth"
    done = run(folder / "checkpoints" / "step-00000010", "--out", safetensors)
    assert done.returncode == 0, done.stderr
    assert f"Complete: {safetensors}" in done.stdout
    assert_equal(read_weights(safetensors), weights[10])

    done = run(safetensors, "--out", pth, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["source"] == str(safetensors)
    assert report["image_size"] == 32
    assert report["parameters"] == sum(tensor.numel() for tensor in weights[10].values())
    assert_equal(torch.load(pth, weights_only=True), weights[10])


def test_a_url_is_no_file_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("run", "--out", "https://user:PASS@host/a.pth?sig=SIGNED")
    assert done.stderr == "error: --out https:/host/a.pth: must be a path of this machine, not a URL\n"
    assert not [*tmp_path.iterdir()]


def test_of_a_run_the_newest_good_checkpoint_is_taken(trained, tmp_path):
    folder, weights = trained
    assert_equal(find_weights(folder)[1], weights[20])
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damaged = copy / "checkpoints" / "step-00000020" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = run(copy, "--out", tmp_path / "sam.pth")
    assert done.returncode == 0, done.stderr
    assert str(damaged) in done.stderr
    assert "step-00000010" in done.stdout
    assert_equal(read_weights(tmp_path / "sam.pth"), weights[10])


def test_what_cannot_be_done_is_said_in_a_line_and_leaves_nothing(trained, tmp_path):
    folder, _ = trained
    out = tmp_path / "out.pth"
    text, empty = tmp_path / "text.pth", tmp_path / "empty"
    text.write_text("not weights")
    empty.mkdir()
    (tmp_path / "empty.pth").mkdir()
    done = run(text, "--out", out)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{text}: not a file of weights, it begins with b'not weights'; pass a .pth or .saf" in line
    for source, target, complaint in (
        (empty, out, "empty: a folder without weights; pass the folder of a run"),
        (folder / "checkpoints", out, "checkpoints: a folder without weights; pass the folder of a run"),
        (tmp_path / "missing.pth", out, r"missing.pth: no such file or folder; pass the folder of a run"),
        (folder, tmp_path / "empty.pth", "empty.pth: must be a file"),
        (folder, tmp_path / "out.bin", "or .pth; tars become shards by `sa1b reshard`"),
        (folder, text, "text.pth: exists; pass --overwrite"),
    ):
        with pytest.raises((Sa1bError, OSError), match=complaint):
            convert(source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "empty.pth", "text.pth"]
    assert text.read_text() == "not weights"


def test_a_folder_is_replaced_only_if_it_has_no_file_of_others(trained, tmp_path):
    folder, weights = trained
    done = run(folder, "--to", "safetensors", "--out", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    assert_equal(read_weights(tmp_path / "new" / "model.safetensors"), weights[20])
    found = {}
    exec(snippets(done.stdout)[0], found)
    assert_equal(found["model"].state_dict(), weights[20])
    with pytest.raises(UsageError, match="new: exists; pass --overwrite to replace its files"):
        convert(folder, tmp_path / "new", to="safetensors")
    (tmp_path / "new" / "model.safetensors.data").write_text("of an earlier conversion")
    convert(folder / "checkpoints" / "step-00000010", tmp_path / "new", to="safetensors", overwrite=True)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model.safetensors"]
    assert_equal(read_weights(tmp_path / "new" / "model.safetensors"), weights[10])
    before = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    for overwrite in (False, True):
        with pytest.raises(
            UsageError, match=r"new: has model.safetensors, which --to onnx does not write; name a"
        ):
            convert(folder, tmp_path / "new", to="onnx", overwrite=overwrite)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    convert(folder, tmp_path / "theirs", to="transformers")
    with pytest.raises(UsageError, match="theirs: exists; pass --overwrite to replace its files"):
        convert(folder, tmp_path / "theirs", to="transformers")
    convert(folder, tmp_path / "theirs", to="transformers", overwrite=True)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "README.md").write_text("of a user")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="own: has README.md, which --to onnx does not write; name a"):
            convert(folder, tmp_path / "own", to="onnx", overwrite=overwrite)
    with pytest.raises(NotADirectoryError, match="Not a directory: .*README.md"):
        convert(folder, tmp_path / "own" / "README.md", to="onnx")
    assert (tmp_path / "own" / "README.md").read_text() == "of a user"


def test_a_form_without_such_a_model_or_without_its_packages_is_refused(trained, tmp_path, monkeypatch):
    folder, _ = trained
    with pytest.raises(UsageError, match="has no model of these sizes, only vit_b, vit_l, vit_h; pass --to"):
        convert(folder, tmp_path / "new", to="segment-anything")
    write_weights(tmp_path / "pixels.pth", Sam(replace(SMALL, pixel_features=8)).state_dict())
    with pytest.raises(UsageError, match="has no pixel features, and this model has 8"):
        convert(tmp_path / "pixels.pth", tmp_path / "new", to="transformers")
    monkeypatch.setattr("sa1b.recipes.conversion.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("missing: onnx, onnxscript; pip install 'sa1b[onnx]'")):
        convert(folder, tmp_path / "new", to="onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["pixels.pth"]


def snippets(printed):
    """The indented lines of each part of the output."""
    parts = printed.split("Load it with ")[1:]
    return ["\n".join(line[4:] for line in part.splitlines() if line.startswith("    ")) for part in parts]


def test_the_snippet_that_is_printed_loads_the_file(trained, tmp_path):
    folder, weights = trained
    done = run(folder, "--out", tmp_path / "sam.pth")
    (own,) = snippets(done.stdout)
    assert "The original package (segment_anything) has no model of these sizes." in done.stdout
    found = {}
    exec(own, found)
    assert_equal(found["model"].state_dict(), weights[20])
    assert_equal(sa1b.load_model(folder).state_dict(), weights[20])
    assert_equal(sa1b.load_model(folder / "checkpoints" / "step-00000010").state_dict(), weights[10])
    with pytest.raises(CheckpointError, match="no such file or folder; pass the folder of a run"):
        sa1b.load_model(tmp_path / "gone")


@pytest.mark.parametrize("name", ["sam.safetensors", pytest.param("sam.pth", marks=pytest.mark.slow)])
@pytest.mark.skipif(find_spec("segment_anything") is None, reason="segment_anything is not installed")
def test_the_snippet_for_the_original_package_loads_the_file_too(tmp_path, name):
    torch.manual_seed(0)
    model = Sam(PRESETS["vit_b"])
    with torch.no_grad():
        model.prompt_encoder.no_mask_embed.weight.fill_(7)
    write_weights(tmp_path / "source.safetensors", model.state_dict())
    done = convert(tmp_path / "source.safetensors", tmp_path / name)
    own, original = snippets(done.table())
    for snippet in (own, original):
        found = {}
        with stand_ins():  # the original package imports torchvision for parts that are not used here
            exec(snippet, found)
        assert_equal(dict(found["model"].state_dict()), model.state_dict())
