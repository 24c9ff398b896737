"""What happens to a rank, without a patch of the package, before a step that is counted from 0 from the process's start:

    stop    the rank is sent SIGTERM, "times" times
    kill    the rank is killed, if the file "once" is not there yet; with "after", so many seconds later; with "file", a
            pattern, when there is such a file
    freeze  the rank is stopped by SIGSTOP
    raise   the rank raises an error of Python, "error"
    hang    the thread that is there waits for ever
    spin    the thread that is there loops for ever
    lock    the thread that is there waits for ever, in C, and keeps the interpreter's lock
    slow    the thread that is there sleeps "seconds", each time until the step "end"
    fill    the rank fills the disk that the folder "disk" is on, when the checkpoint before is written
    command the rank runs the command "command"
    record  nothing happens

It happens after the optimizer has changed the weights of the step before, at step 0 as soon as the process runs, or,
with "at", from then on at one of `PLACES`, each time or, with "single", once. It happens on the rank "rank" or, with
"all", on every rank. With "compile", torch.compile makes graphs but no code of them.
"""

import builtins
import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import simplejpeg
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

ENDLESS = 10**9


def arrange(mishap: dict[str, Any]) -> None:
    """Prepare it in this process, which is a rank: RANK is set."""
    step, first = 0, mishap.get("step", ENDLESS)
    if mishap.get("compile"):  # the graphs are the same whatever makes code of them
        torch.compile = partial(torch.compile, backend="aot_eager")
    if not mishap.get("all") and int(os.environ.get("RANK", "0")) != mishap.get("rank", 0):
        return

    def ends(*_: Any) -> None:
        nonlocal step
        step += 1
        if step == first and "at" not in mishap:
            strike(mishap)

    def there() -> None:
        nonlocal first
        if first <= step < mishap.get("end", ENDLESS):
            first = ENDLESS if mishap.get("single") else first
            strike(mishap)

    register_optimizer_step_post_hook(ends)
    if "at" in mishap:
        PLACES[mishap["at"]](there)
    elif first == 0:
        strike(mishap)


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
    elif what == "hang":
        hang()
    elif what == "spin":
        spin()
    elif what == "lock":
        keep_the_lock()
    elif what == "slow":
        time.sleep(mishap["seconds"])
    elif what == "freeze":
        os.kill(own, signal.SIGSTOP)
    elif what == "fill":
        while not next(Path(mishap["disk"]).rglob("step-????????"), None):
            time.sleep(0.01)
        with contextlib.suppress(OSError), Path(mishap["disk"], "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    elif what != "record":
        subprocess.run(mishap["command"], check=True)


def _kill_at(pattern: str, once: str) -> None:
    while not Path(once).exists():
        if next(Path("/").glob(pattern.lstrip("/")), None):
            Path(once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.0005)


def hang() -> None:
    threading.Event().wait()


def spin() -> None:
    while True:
        pass


def keep_the_lock() -> None:
    while True:
        ctypes.PyDLL(None).sleep(600)  # unlike CDLL, it keeps the lock


def _before(module: Any, name: str, strikes: Callable[[], None], path_has: str | None = None) -> None:
    """Call `strikes` before each call of a function of a library; `path_has`: of its file, the first argument."""
    function = getattr(module, name)

    def called(*given: Any, **options: Any) -> Any:
        if path_has is None or path_has in str(Path(f"/proc/self/fd/{given[0]}").readlink()):
            strikes()
        return function(*given, **options)

    setattr(module, name, called)


PLACES: dict[str, Callable[[Callable[[], None]], object]] = {
    "forward": lambda strikes: register_module_forward_pre_hook(lambda *_: strikes()),
    "update": lambda strikes: register_optimizer_step_pre_hook(lambda *_: strikes()),
    "read": lambda strikes: _before(os, "pread", strikes, ".tar"),
    "decode": lambda strikes: _before(simplejpeg, "decode_jpeg_header", strikes),
    "save": lambda strikes: _before(os, "fsync", strikes, "/checkpoints/"),
}
