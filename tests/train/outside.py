"""What happens to a rank before a step, counted from 0 from the start of the process, without a patch of the package:

    stop    the rank is sent SIGTERM, "times" times
    kill    the rank is killed, if the file "once" is not there yet; with "after", so many seconds later; with "file", a
            pattern, when there is such a file
    freeze  the rank is stopped by SIGSTOP
    raise   the rank raises an error of Python, "error"
    table   the rank is sent SIGUSR2
    fill    the rank fills the disk that the folder "disk" is on
    command the rank runs the command "command"
    record  nothing happens

With "compile", torch.compile makes graphs but no code of them. It happens after the optimizer has changed the weights of the step before, on the rank "rank" or, with "all", on every rank.
"""

import builtins
import contextlib
import os
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def arrange(mishap: dict[str, Any]) -> None:
    """Prepare it in this process, which is a rank: RANK is set."""
    step = 0
    if mishap.get("compile"):  # the graphs are the same whatever makes code of them
        torch.compile = partial(torch.compile, backend="aot_eager")

    def ends(*_: Any) -> None:
        nonlocal step
        step += 1
        if step == mishap.get("step"):
            strike(mishap)

    if mishap.get("all") or int(os.environ.get("RANK", "0")) == mishap.get("rank", 0):
        register_optimizer_step_post_hook(ends)


def strike(mishap: dict[str, Any]) -> None:
    """Let it happen now."""
    what, own = mishap["what"], os.getpid()
    if what == "stop":
        for _ in range(mishap.get("times", 1)):
            os.kill(own, signal.SIGTERM)
    elif what == "kill" and "after" in mishap:
        threading.Timer(mishap["after"], os.kill, (own, signal.SIGKILL)).start()
    elif what == "kill" and "file" in mishap:
        threading.Thread(target=_kill_at, args=(mishap["file"], mishap["once"]), daemon=True).start()
    elif what == "kill":
        with contextlib.suppress(FileExistsError):
            Path(mishap["once"]).touch(exist_ok=False)
            os.kill(own, signal.SIGKILL)
    elif what == "raise":
        raise getattr(builtins, mishap["error"])("no more")
    elif what in ("freeze", "table"):
        os.kill(own, signal.SIGSTOP if what == "freeze" else signal.SIGUSR2)
    elif what == "fill":
        with contextlib.suppress(OSError), Path(mishap["disk"], "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    else:
        subprocess.run(mishap["command"], check=True)


def _kill_at(pattern: str, once: str) -> None:
    while not Path(once).exists():
        if next(Path("/").glob(pattern.lstrip("/")), None):
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.0005)
