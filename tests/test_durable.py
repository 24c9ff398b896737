"""What a command has finished survives a power failure: bytes reach the disk before their name, and the name next.

Each command runs in a process of its own, whose workers are its forks, inside `kit.durable`.
"""

import shlex
import shutil
import sys

import pytest
import torch

import sa1b
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import write_weights
from tests import processes
from tests.datasets import add_view, dataset, root, sources
from tests.kit import put, run
from tests.shards.tiny_source import pairs, write_source

__all__ = ["dataset", "root", "sources"]
TINY = ModelConfig(image_size=32, patch_size=8, width=32, depth=1, heads=2, global_blocks=(0,), channels=32)
FEW = " --points-per-side 2 --min-predicted-iou 0 --min-stability 0"
ALL = '"SELECT image_id, masks FROM images"'
TRAIN = (
    "--preset tiny --data.root {root} --out {out} --model.image-size 32 --model.width 32 --model.depth 1 "
    "--model.heads 2 --model.channels 32 --model.global-blocks 0 --model.window 2 --data.global-batch 2 "
    "--data.masks 2 --data.threads 1 --optim.steps 3 --optim.warmup 1 --checkpoint.every 1 "
    "--checkpoint.keep-last 2 --logging.tensorboard False"
)


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "sam.safetensors"
    torch.manual_seed(0)
    write_weights(path, Sam(TINY).state_dict())
    return path


@pytest.fixture
def durably(tmp_path, root, sources, weights, monkeypatch):
    """A function that runs commands with the names of files in them, one after another, and checks what they sync."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    samples = list(sa1b.open(root))
    put(tmp_path, "ids.txt", "\n".join(str(one.image_id) for one in samples[:4]).encode())
    put(tmp_path, "photos/a.jpg", samples[0].jpeg)
    put(
        tmp_path,
        f"labels/sa_{samples[0].image_id}.json",
        pairs([samples[0].image_id])[samples[0].image_id][1],
    )
    put(tmp_path, "bad/sa_000008.tar", b"\x1f\x8b no gzip stream")
    places = {"root": root, "tmp": tmp_path, "out": tmp_path / "out", "weights": weights}
    places |= {"tar": sources[0], "tars": sources[0].parent}

    def run_all(*commands, code=0):
        """The paths that were synced."""
        words = [shlex.split(command.format(**places)) for command in commands]
        program = (
            "from tests import kit\n"
            "from sa1b.train import main\n"
            f"with kit.durable({str(tmp_path)!r}) as synced:\n"
            f"    for one in {words}:\n"
            f"        assert main(arguments=one) == 0 if one[0][0] == '-' else kit.run(*one, code={code})\n"
            "print(*synced, sep='\\n')"
        )
        done = processes.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=processes.REPOSITORY
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run_all


@pytest.mark.parametrize(
    "command",
    [
        "fetch {tars} --ids {tmp}/ids.txt --out {out}",
        "copy {root} {out}",
        "copy local://{root} {out} --scratch {tmp}/scratch",
        "view {root} --subset 50% --name half",
        "view local://{root} --subset 50% --out {tmp}/half.json",
        f"query {{root}} {ALL} --as-view all",
        f"query {{root}} {ALL} --parquet {{tmp}}/all.parquet",
        "gallery {root} --out {tmp}/page.html",
        "synthesize {out} --long-side 64 --images-per-tar 2 --phrases --workers 1",
        "layer add {root} {tmp}/labels --name more --existing hide",
        "annotate {tmp}/photos --weights {weights} --out {out}" + FEW,
        "annotate --shards {root} --weights {weights} --name found" + FEW,
        "convert {weights} --out {tmp}/sam.safetensors",
        "convert {weights} --out {tmp}/sam.pth",
        "convert {weights} --out {out} --to transformers",
        "export {root} --out {out} --to sa1b",
        "export {root} --out {out} --to sa1b --plain --workers 2",
        "export {root} --out {out} --to folders",
        "export {root} --out {out} --to images --image-size 32",
        "export {root} --out {out} --to sam2",
        "export {root} --out {out} --to efficientvit",
        "export {root} --out {out} --to coco",
        "export {root} --out {out} --to coco --images-per-file 5",
        "export {root} --out {out} --to parquet",
    ],
)
def test_what_a_command_has_written_is_on_the_disk(durably, command):
    durably(command)


def test_reshard_of_good_bad_and_replaced_sources(durably, tmp_path):
    durably("reshard {tars} --out {out} --images-per-shard 5", code=3)
    durably("reshard {tmp}/bad --out {out} --images-per-shard 5", code=1)
    write_source(
        tmp_path / "new" / "sa_000002.tar", {**pairs([300, 301, 302]), 303: (b"no jpeg", b"no json")}
    )
    durably("reshard {tmp}/new --out {out} --images-per-shard 5 --replace", code=3)


@pytest.mark.parametrize("lost", ["*.parquet", "samples-*.bin", "dataset.json", "tasks/*", "names"])
def test_index_of_lost_files_and_exchanged_shards(durably, root, lost):
    if lost == "names":
        first, second = (root / f"sa1b-000001-000{number}.tar" for number in range(2))
        first.rename(root / "first")
        second.rename(first)
        (root / "first").rename(second)
    for path in list(root.glob(lost)):
        path.unlink()
    durably("index {root}")
    if lost != "*.parquet":
        durably("index {root} --tables")


def test_exports_with_joined_columns_links_and_two_views(durably, root):
    ids = sorted(sample.image_id for sample in sa1b.open(root))
    add_view(root, ids[:5], "one")
    add_view(root, ids[5:], "other")
    captions = root.parent / "captions.parquet"
    run("query", root, "SELECT image_id, 'a cat' AS caption FROM images", "--parquet", captions)
    durably(
        "export {root} --out {tmp}/yolo --to yolo-seg --view one --val-view other",
        "export {root} --out {tmp}/tars --to webdataset --images-per-tar 5 --join caption={tmp}/captions.parquet",
        "export {root} --out {tmp}/a --to folders",
        "export {root} --out {tmp}/b --to folders --link-from {tmp}/a",
    )


def test_verify_keeps_its_progress(durably, tmp_path):
    assert f"{tmp_path}/state" in durably("verify {root} --state {tmp}/state")


def test_checkpoints_of_a_run_that_is_resumed(durably, tmp_path):
    durably(TRAIN)
    folder = tmp_path / "out" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    shutil.rmtree(folder / "step-00000003")
    durably(TRAIN)
    assert (folder / "step-00000003").exists()
