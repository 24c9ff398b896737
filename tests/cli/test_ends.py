"""The end of every command after wrong arguments, and in real processes after an interrupt or a closed output."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sa1b.verbs import in_order
from tests.cli.verb import called, runner

VERBS = [verb for verb in in_order() if " " not in verb]

REPOSITORY = Path(__file__).parents[2]
PATIENCE = 120  # seconds
ROOT_FLAGS = {"reshard": ("--out", "x"), "export": ("--to", "sa1b", "--out", "x"), "convert": ("--out", "x")}


def sa1b(verb: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return (runner if verb == "train" else called)(verb)(*arguments)


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_flag_is_a_usage_error_of_one_line_that_names_it(verb: str) -> None:
    arguments = {"train": (), "slurm": ("train",)}.get(verb, ("source", *ROOT_FLAGS.get(verb, ())))
    done = sa1b(verb, *arguments, "--nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "--nonsense" in line
    assert line.endswith(f"sa1b {'train' if verb == 'slurm' else verb} --help`")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify",), "error: ROOT: missing"),
        (("reshard", "a"), "error: --out PATH: missing"),
        (("reshard", "a", "--out"), "error: --out: its value is missing; see "),
        (
            ("reshard", "a", "--out", "b", "--workers", "two"),
            "error: --workers two: must be a whole number; ",
        ),
        (("view", "r", "--split", "other"), "error: --split other: must be one of 'train', 'held-out'; "),
        (("export", "r", "--out", "b", "--to", "voc"), "error: --to voc: must be one of 'sa1b', "),
        (
            ("convert", "r", "--out", "b", "--to", "x"),
            "error: --to x: must be one of 'onnx', 'safetensors', 'segment-anything', 'transformers'; ",
        ),
        (("gallery", "r", "--id", "x"), "error: --id x: not a valid value; "),
        (("query", "r", "SELECT 1", "--limit", "0"), "error: --limit 0: must be at least 1"),
        (("verify", "a", "b"), "error: b: one argument too many; "),
        (
            ("train", "shards"),
            "error: shards: has no flag before it; pass --data.root shards if it is the data",
        ),
        (("verify", "r", "--jsn"), "error: --jsn: no such flag; did you mean --json? see "),
        (
            ("train", "--data.golbal-batch", "3"),
            "error: --data.golbal-batch: no such flag; did you mean --data.global-batch?",
        ),
        (("train", "--optim.lr", "abc"), "error: --optim.lr abc: must be a number; "),
        # A misspelled flag is the reason that another argument is missing.
        (("reshard", "source", "--outt", "x"), "error: --outt: no such flag; did you mean --out?"),
        (("gallery", "--ot=x"), "error: --ot: no such flag; did you mean --out?"),
        (("verify", "--bogus"), "error: --bogus: no such flag; see "),
        (("export", "-w", "3"), "error: -w: no such flag; see "),
        (("train", "--preset", "tiny"), "--data.root"),
    ],
)
def test_a_wrong_command_line_is_refused_with_code_2_and_the_flag(
    arguments: tuple[str, ...], message: str
) -> None:
    done = sa1b(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.parametrize(
    "arguments", [("verify", "r", "--jsn"), ("export", "r"), ("verify", "r", "--workers")]
)
def test_a_refusal_is_the_same_line_where_the_output_is_ascii(arguments: tuple[str, ...]) -> None:
    verb, *words = arguments
    one, other = (called(verb, encoding)(*words) for encoding in ("utf-8", "ascii"))
    assert (one.returncode, len(one.stderr.splitlines())) == (2, 1)
    assert (other.returncode, other.stderr) == (2, one.stderr)


@pytest.mark.parametrize(
    "verb",
    [
        ("verify",),
        ("verify", "--warnings"),
        ("index",),
        ("index", "--tables"),
        ("export", "--to", "sa1b", "--out", "x"),
        ("view", "--subset", "1%"),
        ("copy", "x"),
        ("bench",),
    ],
    ids=" ".join,
)
def test_one_message_for_a_path_without_a_dataset(verb: tuple[str, ...], tmp_path: Path) -> None:
    no_dataset = "no dataset there; pass the --out folder of `sa1b reshard`"
    (tmp_path / "dataset.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "sa_000001.tar").write_bytes(b"")
    for path, message in (
        (tmp_path / "nowhere", no_dataset),
        (tmp_path / "empty", no_dataset),
        *([] if verb[0] == "index" else [(tmp_path / "sa_000001.tar", no_dataset)]),  # index takes shards
        (tmp_path / "dataset.json", f"a file; pass its folder, '{tmp_path}'"),
    ):
        done = sa1b(verb[0], path, *verb[1:])
        assert (done.returncode, done.stderr) == (2, f"error: {path}: {message}\n")


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (["-m", "sa1b", "verify", "root"], "pyarrow"),
        (["-m", "sa1b", "convert", "run", "--out", "x.pth"], "torch"),
        (["-m", "sa1b", "train"], "torch"),
        (["-m", "sa1b.train"], "torch"),
        (["sa1b/train.py"], "torch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_ctrl_c_while_modules_load_ends_with_130_and_without_a_traceback(
    command: list[str], module: str, tmp_path: Path
) -> None:
    # A slow module that turns the exception of an interrupted import into another one.
    code, output, errors = interrupted_while_loading(
        [sys.executable, *command],
        module,
        "try:\n    while True:\n        time.sleep(0.01)\nexcept KeyboardInterrupt:\n    raise ImportError('half loaded') from None\n",
        tmp_path,
    )
    assert (code, output) == (130, "")
    assert errors.strip() == "interrupted: nothing was written"


def test_a_process_that_ignores_ctrl_c_ignores_it_while_modules_load_too(tmp_path: Path) -> None:
    rest = f"while not pathlib.Path({str(tmp_path / 'sent')!r}).exists():\n    time.sleep(0.01)\nraise SystemExit(7)\n"
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "sa1b", "verify", "root"]
    assert interrupted_while_loading(ignoring, "pyarrow", rest, tmp_path) == (7, "", "")


def interrupted_while_loading(
    command: list[str], module: str, rest: str, folder: Path
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that gets SIGINT while it imports a module with this code."""
    loading = folder / "loading"
    begin = f"import pathlib, time\npathlib.Path({str(loading)!r}).touch()\n"
    (folder / f"{module}.py").write_text(begin + rest)
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        end = time.monotonic() + PATIENCE
        while not loading.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        (folder / "sent").touch()
        output, errors = process.communicate(timeout=PATIENCE)
    return process.returncode, output, errors


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("reshard", "--help"),
        pytest.param(("train", "--help"), marks=pytest.mark.slow),
        ("--version",),
    ],
)
def test_a_reader_that_is_gone_is_no_success_and_no_message(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "sa1b", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
