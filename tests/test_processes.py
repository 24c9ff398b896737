"""Forked commands behave as commands of a new interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import processes

SHOW = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ.get("SHOWN"), __name__, sys.path[0], sys.stdin.read()]))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
@pytest.mark.parametrize("text", [True, False])
def test_arguments_streams_folder_environment_and_exit_code_are_those_of_subprocess(
    kind: str, text: bool, tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text(SHOW)
    first = {"-c": ["-c", SHOW], "-m": ["-m", "shown"], "script": [str(tmp_path / "shown.py")]}[kind]
    options: dict[str, Any] = {
        "cwd": tmp_path, "env": {**os.environ, "SHOWN": "ä"}, "capture_output": True, "text": text,
        "input": "given\n" if text else b"given\n",
    }  # fmt: skip
    command = [sys.executable, *first, "one", "--two"]
    new, forked = subprocess.run(command, check=False, **options), processes.run(command, **options)
    assert forked.returncode == new.returncode == 3
    assert forked.stdout == new.stdout
    assert forked.stderr == new.stderr


def test_it_is_forked_and_has_what_was_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/other")  # as torch does at an optimizer
    code = "import sys, os; print('torch' in sys.modules, os.getppid())"
    done = processes.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == f"True {processes._server().pid}\n"


@pytest.mark.parametrize(
    ("options", "environment"),
    [(["-W", "error"], {}), ([], {"PYTHONWARNINGS": "error"}), ([], {"OMP_NUM_THREADS": "7"})],
)
def test_what_a_fork_cannot_give_starts_a_new_interpreter(
    options: list[str], environment: dict[str, str]
) -> None:
    command = [sys.executable, *options, "-c", "import sys; print('torch' in sys.modules)"]
    done = processes.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.stdout == "False\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_as_a_new_interpreter(number: int) -> None:
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    with processes.Process(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(60) == -number


def test_a_session_of_its_own_can_be_signalled_as_a_group() -> None:
    # One write for each line: with PYTHONUNBUFFERED, print makes two, and those of two processes may mix.
    code = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpgid(0)); time.sleep(600)"
    command = [sys.executable, "-c", code]
    with processes.Process(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        groups = [process.stdout.readline() for _ in range(2)]
        assert groups == [f"{process.pid}\n"] * 2
        os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""  # both have ended
        assert process.wait(60) == -signal.SIGKILL


def test_an_error_in_the_test_ends_the_process() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(RuntimeError), processes.Process(command) as process:
        raise RuntimeError
    assert process.poll() == -signal.SIGKILL


def test_a_timeout_a_failure_and_an_uncaught_error_are_reported(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run([sys.executable, "-c", "import time; time.sleep(600)"], timeout=0.1)
    with pytest.raises(subprocess.CalledProcessError):
        processes.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)
    with (tmp_path / "log").open("w+") as log:
        done = processes.run(
            [sys.executable, "-c", "print(1, flush=True); 1 / 0"], stdout=log, stderr=subprocess.STDOUT
        )
        log.seek(0)
        assert log.readline() == "1\n"
        assert log.read().endswith("ZeroDivisionError: division by zero\n")
    assert done.returncode == 1


def test_no_descriptor_of_another_command_is_inherited() -> None:
    """A pipe held open by another command would never end."""
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with processes.Process(wait, **pipes) as first, processes.Process(wait, **pipes) as second:
        first.stdin.close()
        assert first.wait(60) == 0
        assert first.stdout.read() == b""
        second.stdin.close()
        assert second.wait(60) == 0


def test_its_worker_processes_import_the_main_script(tmp_path: Path) -> None:
    """A spawned process imports the file of `__main__`."""
    script = tmp_path / "spawning.py"
    script.write_text(
        "import multiprocessing\n"
        "def double(number): return 2 * number\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
    )
    done = processes.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "[2, 4]\n", done.stderr
