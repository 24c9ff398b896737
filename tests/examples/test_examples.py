"""Every example runs as its docstring says, on small synthetic data, in real processes."""

import ast
import base64
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import sa1b
from sa1b.sam.model import ModelConfig, Sam
from sa1b.sam.published import read_weights, write_weights
from tests import kit, processes
from tests.shards import tiny
from tests.storage.service import Service

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
IMAGES = 11  # a prime, so that the numbers of ranks and steps do not divide it
HELD_OUT = 3


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `shards`, made from synthetic tars, with a training and a held-out view."""
    folder = tmp_path_factory.mktemp("material")
    tiny.synthesize(folder / "sa_000000.tar", images=IMAGES, first_id=1, long_side=96)
    root = folder / "shards"
    tiny.ingest_tar(folder / "sa_000000.tar", root)
    ids = sorted(sample.image_id for sample in sa1b.open(root))
    for name, chosen in (("held-out", ids[:HELD_OUT]), ("train", ids[HELD_OUT:])):
        (folder / name).write_text("\n".join(map(str, chosen)))
        kit.run("view", root, "--ids", folder / name, "--name", name)
    return folder


@pytest.fixture
def folder(material: Path, tmp_path: Path) -> Path:
    """An empty folder beside `shards`, in a folder with no other files."""
    shutil.copytree(material / "shards", tmp_path / "shards")
    return tmp_path


def environment() -> dict[str, str]:
    """Environment of a process that starts others: they find this package and have one thread each."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(folder: Path, name: str, *arguments: object, **options: Any) -> str:
    """Run an example and return its output."""
    done = finished(folder, name, *arguments, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return str(done.stdout)


def finished(
    folder: Path, name: str, *arguments: object, launcher: tuple[str, ...] = (), starts_others: bool = False
) -> Any:
    command = [sys.executable, *launcher, str(EXAMPLES / name), *map(str, arguments)]
    env = environment() if launcher or starts_others else None
    return processes.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=1200)


def ids_of(printed: str) -> list[int]:
    return [
        int(number) for line in re.findall(r"images \[([\d, ]+)\]", printed) for number in line.split(",")
    ]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip without a package of the extra `examples`."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"needs {', '.join(missing)}: pip install -e '.[examples]'"
    )


def test_stream_from_disk_stops_and_resumes_within_an_epoch(folder: Path) -> None:
    arguments = ("shards", "--image-size", 64, "--batch", 4)
    first = run(folder, "stream_from_disk.py", *arguments, "--steps", 2)
    assert "decode" in first
    second = run(folder, "stream_from_disk.py", *arguments)
    assert len(ids_of(first)) == 8
    assert sorted(ids_of(first) + ids_of(second)) == list(range(1, IMAGES + 1))


def test_stream_from_s3_reads_from_a_store(folder: Path) -> None:
    (folder / "bucket").mkdir()
    (folder / "shards").rename(folder / "bucket" / "shards")
    with Service("range_server", folder) as service:
        printed = run(
            folder, "stream_from_s3.py", "s3://bucket/shards", "--endpoint", service.url, "--anonymous",
            "--image-size", 64, "--steps", 3,
        )  # fmt: skip
        assert sorted(ids_of(printed)) == list(range(1, IMAGES + 1))


def test_stream_from_s3_names_a_url_without_a_dataset(folder: Path) -> None:
    with Service("range_server", folder) as service:
        arguments = ("s3://bucket/none", "--endpoint", service.url, "--anonymous")
        done = finished(folder, "stream_from_s3.py", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: s3://bucket/none: no dataset there")


MISSING = {
    "stream_from_disk.py": (),
    "lightning.py": (),
    "accelerate.py": (),
    "finetune_published_sam.py": ("--weights", "sam.pth"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_wrong_path_is_one_line(name: str, folder: Path) -> None:
    for package in {"lightning.py": ["lightning"], "accelerate.py": ["accelerate"]}.get(name, []):
        pytest.importorskip(package)
    done = finished(folder, name, "nothere", *MISSING[name])
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == errors[0]
    assert ("sam.pth" if "--weights" in MISSING[name] else "nothere") in errors[0]


@needs("accelerate")
def test_accelerate_resumes_only_from_a_checkpoint(folder: Path) -> None:
    done = finished(folder, "accelerate.py", "shards", "--out", "nowhere", "--resume")
    assert done.returncode == 2
    assert done.stderr.endswith("error: --resume: nowhere has no checkpoint; check --out\n")


@pytest.mark.parametrize("package", ["lightning", "accelerate"])
def test_a_missing_extra_is_named(package: str, folder: Path) -> None:
    example = str(EXAMPLES / f"{package}.py")
    program = (
        f"import runpy, sys\nsys.modules[{package!r}] = None\n"
        f"sys.argv, sys.path[0] = [{example!r}, 'shards'], {str(EXAMPLES)!r}\n"
        f"runpy.run_path({example!r}, run_name='__main__')\n"
    )
    done = processes.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: the package {package} is missing; install it with: pip install 'sa1b[examples]'\n"
    )


def losses(printed: str) -> dict[int, float]:
    """Step -> loss, as the examples print them."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): .*?loss ([\d.]+)", printed)}


# Those of examples/lightning.py.
SETTINGS = (
    "--preset tiny --model.image-size 64 --data.view train --data.global-batch 4 --data.masks 8 --data.flip 0.5 "
    "--optim.lr 1e-3 --optim.reference-batch 4 --optim.schedule step --optim.milestones 1000 "
    "--optim.min-lr-ratio 0 --optim.warmup 0 --optim.weight-decay 0 --optim.grad-clip 0 "
    "--logging.tensorboard False"
)


@pytest.fixture(scope="module")
def trained(material: Path) -> dict[int, float]:
    """The losses of four steps of `sa1b train`."""
    flags = ["--data.root", "shards", "--out", "trained", "--optim.steps", "4", *SETTINGS.split()]
    command = [sys.executable, "-m", "sa1b.train", *flags]
    processes.run(command, cwd=material, capture_output=True, text=True, timeout=1200, check=True)
    return losses_of(material / "trained")


def losses_of(run: Path) -> dict[int, float]:
    """Step -> loss of a run of `sa1b train`."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


LAST = "runs/lightning/last.ckpt"


def lightning_run(folder: Path, *arguments: object, **options: Any) -> str:
    return run(folder, "lightning.py", "shards", "--image-size", 64, *arguments, **options)


@needs("lightning")
def test_lightning_trains_as_sa1b_does_and_resumes_within_an_epoch(
    folder: Path, trained: dict[int, float]
) -> None:
    printed = lightning_run(folder, "--epochs", 2, "--steps", 1)
    printed += lightning_run(folder, "--epochs", 2, "--resume", LAST)
    assert losses(printed) == pytest.approx(trained, rel=1e-5)
    assert 0 <= ast.literal_eval(printed.strip().splitlines()[-1])["iou"] <= 1


@pytest.mark.slow
@needs("lightning")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("steps", [1, 2, 3])  # within the first epoch, after it, and within the second one
def test_lightning_in_two_processes_trains_as_in_one(
    folder: Path, trained: dict[int, float], strategy: str, steps: int
) -> None:
    two = ("--devices", 2, "--strategy", strategy)
    printed = lightning_run(folder, "--epochs", 2, "--steps", steps, *two, starts_others=True)
    printed += lightning_run(folder, "--epochs", 2, "--resume", LAST, *two, starts_others=True)
    assert losses(printed) == pytest.approx(trained, rel=1e-5)


@needs("torchdata")
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_loader_of_torchtitan_resumes_from_a_distributed_checkpoint(folder: Path, workers: int) -> None:
    arguments = ("shards", "--image-size", 64, "--workers", workers)
    whole = run(folder, "torchtitan_dataloader.py", *arguments, "--steps", 3, "--out", "whole")
    parts = "".join(run(folder, "torchtitan_dataloader.py", *arguments, "--steps", end) for end in (1, 3))
    assert parts == whole
    assert len(losses(whole)) == 3


@pytest.mark.slow
def test_a_loader_of_torchtitan_resumes_with_another_number_of_ranks(folder: Path) -> None:
    arguments = ("shards", "--image-size", 64)
    whole = run(folder, "torchtitan_dataloader.py", *arguments, "--steps", 4, "--out", "whole")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    printed = run(folder, "torchtitan_dataloader.py", *arguments, "--steps", 2, launcher=torchrun)
    printed += run(folder, "torchtitan_dataloader.py", *arguments, "--steps", 4)
    assert losses(printed) == pytest.approx(losses(whole), rel=1e-5)


RAY = ("--out", "runs/ray", "--workers", 2, "--")


@needs("ray")
def test_a_wrong_flag_for_ray_train_ends_it_before_ray_starts(folder: Path) -> None:
    done = finished(folder, "ray_train.py", "shards", *RAY, "--optim.stepz", 3)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --optim.stepz: no such flag; did you mean --optim.steps?")


@pytest.mark.slow
@needs("ray")
def test_ray_train_trains_and_resumes(folder: Path, trained: dict[int, float]) -> None:
    for steps in (2, 4):
        run(
            folder,
            "ray_train.py",
            "shards",
            *RAY,
            *SETTINGS.split(),
            "--optim.steps",
            steps,
            starts_others=True,
        )
    assert losses_of(folder / "runs" / "ray") == pytest.approx(trained, rel=1e-5)


def descendants(pid: int) -> list[tuple[int, str]]:
    """(pid, name) of the processes that a process has started, directly or not."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    named = [(int(child), Path(f"/proc/{child}/cmdline").read_text()) for child in children]
    return named + [one for child, _ in named for one in descendants(child)]


@pytest.mark.slow
@needs("ray")
def test_a_killed_worker_of_ray_train_costs_no_step(folder: Path, trained: dict[int, float]) -> None:
    more = (*SETTINGS.split(), "--optim.steps", 40, "--checkpoint.every", 2)
    words = [sys.executable, EXAMPLES / "ray_train.py", "shards", "--max-failures", 1, *RAY, *more]
    out, log = folder / "runs" / "ray", folder / "log"
    with (
        log.open("w") as file,
        processes.Process(words, cwd=folder, env=environment(), stdout=file, stderr=file) as process,
    ):
        while not (out / "metrics.jsonl").exists() or max(losses_of(out), default=0) < 3:
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        workers = [pid for pid, name in descendants(process.pid) if name.startswith("ray::RayTrainWorker")]
        os.kill(workers[-1], signal.SIGKILL)
        assert process.wait(300) == 0, log.read_text()
    assert re.search(r"resuming after step \d+", log.read_text())
    losses = losses_of(out)
    assert list(losses) == list(range(1, 41))
    assert {step: losses[step] for step in trained} == pytest.approx(trained, rel=1e-5)


LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--main_process_port", "0")


@needs("accelerate")
def test_accelerate_reads_every_image_once_over_two_processes(folder: Path) -> None:
    printed = run(folder, "accelerate.py", "shards", "--image-size", 64, "--epochs", 1, launcher=LAUNCH)
    assert f"epoch 0: {IMAGES} images" in printed


@pytest.mark.slow
@needs("accelerate")
def test_accelerate_resumes_with_another_number_of_processes(folder: Path) -> None:
    arguments = ("shards", "--image-size", 64)
    run(folder, "accelerate.py", *arguments, "--epochs", 1)
    printed = run(folder, "accelerate.py", *arguments, "--epochs", 3, "--resume", launcher=LAUNCH)
    found = re.findall(r"epoch (\d): (\d+) images", printed)
    assert found == [("1", str(IMAGES)), ("2", str(IMAGES))]


def test_finetune_published_sam_changes_the_decoder_only(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"image_size": 64, "width": 64, "depth": 2, "heads": 2, "window": 2, "channels": 32}
    write_weights(folder / "sam.pth", Sam(ModelConfig(**sizes, global_blocks=(1,))).state_dict())
    printed = run(
        folder, "finetune_published_sam.py", "shards", "--weights", "sam.pth", "--steps", 2, "--masks", 4,
        "--lr", 1e-3, "--out", "tuned.safetensors",
    )  # fmt: skip
    assert len(re.findall(r"^step \d: loss [\d.]+, IoU [\d.]+", printed, re.MULTILINE)) == 2
    assert re.search(r"^tuned.safetensors: image 1, predicted IoU", printed, re.MULTILINE)
    before, after = (read_weights(folder / name) for name in ("sam.pth", "tuned.safetensors"))
    changed = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"prompt_encoder", "mask_decoder"}


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cells of code of a notebook that was run in `folder`."""
    import nbformat
    from nbclient import NotebookClient

    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(folder / variable))
    for variable, value in environment().items():
        monkeypatch.setenv(variable, value)
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@needs("nbclient", "ipykernel")
def test_the_notebook_runs_and_shows_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = executed("explore.ipynb", folder, monkeypatch)
    dataset, sample, shown = (outputs_of(cell) for cell in cells[:3])
    assert [kind for kind, _ in dataset] == ["execute_result"]
    assert {"text/plain", "text/html", "image/png"} <= set(dataset[0][1])
    assert dataset[0][1]["text/plain"].startswith(f"Dataset('shards': {IMAGES} images, ")
    assert Image.open(BytesIO(base64.b64decode(sample[0][1]["image/png"]))).format == "PNG"
    assert [kind for kind, _ in shown] == ["display_data", "execute_result"]  # show() returns None
    assert "image/png" in shown[0][1]
    assert (folder / "largest.png").exists()
    assert outputs_of(cells[-1])[0][1]["text/plain"].startswith("stage ")


def outputs_of(cell: Any) -> list[tuple[str, dict[str, str]]]:
    return [(output.output_type, dict(output.get("data", {}))) for output in cell.outputs]


def scores_of(cells: list[Any]) -> dict[str, tuple[float, float]]:
    """Prompt -> scores before and after, of the table that the notebook on fine-tuning prints."""
    printed = "".join("".join(output.get("text", "")) for cell in cells for output in cell["outputs"])
    rows = re.findall(r"^(\d clicks?|box) +(0\.\d+) +(0\.\d+)$", printed, re.MULTILINE)
    return {prompt: (float(before), float(after)) for prompt, before, after in rows}


@pytest.mark.slow
@needs("nbclient", "ipykernel")
def test_the_notebook_on_fine_tuning_improves_every_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = executed("finetune.ipynb", tmp_path, monkeypatch)
    scores = scores_of(cells)
    assert set(scores) == {"1 click", "3 clicks", "5 clicks", "box"}
    assert {prompt for prompt, (before, after) in scores.items() if after <= before} == set()
    assert "image/png" in outputs_of(cells[-1])[0][1]


def stored_cells(name: str) -> list[Any]:
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize(("name", "least", "images"), [("explore.ipynb", 9, 4), ("finetune.ipynb", 7, 2)])
def test_a_notebook_is_stored_as_executed_from_top_to_bottom(name: str, least: int, images: int) -> None:
    text = (EXAMPLES / name).read_text()
    counts = [cell["execution_count"] for cell in stored_cells(name)]
    assert counts == list(range(1, len(counts) + 1))
    with_outputs = sum(bool(cell["outputs"]) for cell in stored_cells(name))
    assert (with_outputs >= least, len(text) < 300_000, text.count("image/jpeg") >= images) == (True,) * 3
    assert re.findall("/(?:home|root|tmp|work|usr)/", text) == []  # no path of the machine that ran it


def test_the_stored_scores_of_fine_tuning_are_better_after_it() -> None:
    scores = scores_of(stored_cells("finetune.ipynb"))
    assert (len(scores), all(after > before for before, after in scores.values())) == (4, True)


def test_examples_are_short_and_listed() -> None:
    files = {path.name: path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".ipynb")}
    listed = re.findall(r"^\| \[`([\w.]+)`\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(files)
    lengths = {
        name: sum(len(cell["source"]) for cell in stored_cells(name))
        if path.suffix == ".ipynb"
        else len(path.read_text().splitlines())
        for name, path in files.items()
    }
    assert {name: lines for name, lines in lengths.items() if lines >= 120} == {}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_docstring_is_the_command_that_runs_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    assert docstring
    assert f"    python examples/{path.name} " in docstring
