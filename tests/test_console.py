"""The end of commands: exit codes and output, which all commands share."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sa1b import console, report
from sa1b.console import run
from sa1b.errors import UsageError


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("--out: why"), 2, "--out: why"),
        (OSError(28, "No space left", "/x"), 2, "/x: no space left; free space on this disk"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_with_json_an_error_is_an_object_on_stdout(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(json: bool = False) -> int:
        raise error

    monkeypatch.setattr(sys, "argv", ["tool", "--json"])
    with pytest.raises(SystemExit) as ended:
        run(main, None)
    assert ended.value.code == code
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"error": message, "exit_code": code}
    assert message in shown.err
    monkeypatch.setattr(sys, "argv", ["tool"])
    with pytest.raises(SystemExit):
        run(main, None)
    assert capsys.readouterr().out == ""


def test_an_interrupt_that_meets_a_finalizer_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # restored after the test

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def main() -> int:
        Finalized()
        time.sleep(10)
        return 0

    with pytest.raises(SystemExit) as ended:
        run(main, None, arguments=())
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_with_json_a_bug_and_a_wrong_flag_are_objects_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(json: bool = False) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(sys, "argv", ["tool", "--json"])
    with pytest.raises(ZeroDivisionError):
        run(main, None)
    assert json.loads(capsys.readouterr().out) == {"error": "ZeroDivisionError: a bug", "exit_code": 1}
    monkeypatch.setattr(sys, "argv", ["tool", "--json", "--nonsense"])
    with pytest.raises(SystemExit):
        run(main, None)
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment of links, with a script `sa1b`."""
    for name in ("python", "sa1b"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def advised(monkeypatch: pytest.MonkeyPatch, path: str, executable: Path, scripts: Path) -> str:
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(sys, "executable", str(executable))
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(scripts))
    console._program.cache_clear()
    return console.command("verify")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    console._program.cache_clear()


def test_advice_names_the_script_only_where_the_path_finds_the_one_of_this_installation(
    environment: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, other = environment / "python", tmp_path_factory.mktemp("other installation")
    assert advised(monkeypatch, str(environment), python, environment) == "sa1b verify"
    # The script that is found belongs to another installation.
    assert advised(monkeypatch, str(environment), python, other) == "python -m sa1b verify"
    # A wheel without its folder on PATH, an environment that is not activated.
    assert advised(monkeypatch, str(other), python, environment) == f"{python} -m sa1b verify"
    # pipx and uv link to the script in an environment of their own.
    (other / "sa1b").symlink_to(environment / "sa1b")
    assert advised(monkeypatch, str(other), python, environment) == "sa1b verify"
    # What is printed can be pasted, also with a space in it.
    (other / "python").write_text("")
    assert advised(monkeypatch, "", other / "python", other) == f"'{other / 'python'}' -m sa1b verify"


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (0.00254, "0.0025"),
        (2.1e-5, "0.000021"),
        (0.5, "0.50"),
        (2.14, "2.1"),
        (99.94, "99.9"),
        (1060.17, "1,060"),
    ],
)
def test_small_numbers_are_not_rounded_to_nothing(number: float, shown: str) -> None:
    assert report.rounded(number) == shown


def test_paths_in_advice_are_quoted() -> None:
    advice = console.command("reshard", "--out", Path("my data"), "--finish")
    assert advice == f"{console.command('reshard')} --out 'my data' --finish"
