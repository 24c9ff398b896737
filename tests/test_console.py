"""What all command lines share: how they end."""

import json
import sys

import pytest

from sa1b.console import run
from sa1b.errors import UsageError


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("--out: why"), 2, "--out: why"),
        (OSError(28, "No space left", "/x"), 2, "[Errno 28] No space left: '/x'"),
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
