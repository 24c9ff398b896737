"""Completion of verbs and flags, by bash itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sa1b.verbs import in_order
from tests.cli.verb import runner

VERBS = [verb for verb in in_order() if " " not in verb]

COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
$(complete -p sa1b | sed 's/.*-F \\([^ ]*\\).*/\\1/') sa1b "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_verbs_and_their_flags(tmp_path: Path) -> None:
    script = tmp_path / "sa1b.bash"
    done = runner("--tyro-write-completion")("bash", script)
    assert done.returncode == 0, done.stderr

    def completed(*words: str) -> set[str]:
        command = ["bash", "-c", COMPLETE, "bash", str(script), "sa1b", *words]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        return {word.strip() for word in shown.stdout.split()}

    assert set(VERBS) <= completed("")
    assert completed("ver") == {"verify"}
    assert "--deep" in completed("verify", "--")
    assert completed("reshard", "--image-") == {"--image-ids", "--image-size"}
    assert all(word.startswith("--") for word in completed("gallery", "--"))
    assert "--data.root" in completed("train", "--data.r")


def test_the_script_can_be_printed_and_another_shell_is_refused() -> None:
    assert "complete" in runner("--tyro-print-completion")("zsh").stdout
    refused = runner("--tyro-print-completion")("cmd")
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.startswith("error: ")
    assert "--tyro-print-completion" in line
