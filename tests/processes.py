"""Python commands as real processes that need not import torch: forked from one that has imported it.

`run` and `Process` replace `subprocess.run` and `subprocess.Popen` for commands of this Python:

    processes.run([sys.executable, "tools/reshard.py", tar, "--out", out], capture_output=True, text=True)
    processes.Process([sys.executable, "-m", "sa1b.train", *flags], stdout=log, start_new_session=True)

Importing torch and the package takes 2 to 3 s of processor time, which is most of the time of a test that
starts a command. A server, one for all processes of a test run, imports them once and forks a child for each
command. The child has its own pid, working directory, environment, arguments, standard streams and, on
request, session. It runs the script, module or `-c` program as `__main__`. Signals, exit codes and threads
behave as in a new interpreter.

Five things differ: the modules of `PRELOADED` are already imported; the parent of the child is the server;
/proc/PID/cmdline is the server's; worker processes of the child are its forks (forked_workers.py); and at its end
a process runs exit functions and waits for threads, but does not destroy its modules. Use `subprocess` in a test
of imports, of start-up time, of resource limits, or of the end of the interpreter. Other programs, commands with
interpreter options (`python -W error`), and commands with other values of the variables that are read at start
(`AT_START`) are started by `subprocess`.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing.process
import os
import pkgutil
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests import forked_workers  # before the package

REPOSITORY = Path(__file__).parents[1]
PRELOADED = (
    "tests.train.preloaded",
    "tests.warm_up",  # with the compiled kernels of ingest
    "torch.distributed.checkpoint.format_utils",
    "torch.distributed.run",
    "torch.utils.serialization.config",
    "torch._dynamo",  # torch's optimizers import this module at their first step
    "pytest",
    "hypothesis.strategies",
    "s3fs",
)
# Variables that Python or a library reads when it starts.
AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "NUMBA_"),
    *("TORCH_", "TORCHINDUCTOR_", "TRITON_", "CUDA_", "COVERAGE_", "HF_", "NUMBA_DISABLE_JIT"),
)
NUMBER = struct.Struct("<q")


class Process:
    """A running command, with the interface of `subprocess.Popen` as far as the tests need it."""

    def __init__(
        self,
        command: Sequence[object],
        *,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        cwd: "str | os.PathLike[str] | None" = None,
        env: Mapping[str, str] | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> None:
        self.args = [str(word) for word in command]
        self.returncode: int | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._readers: dict[Any, threading.Thread] = {}
        self._read: dict[Any, Any] = {}
        environment = dict(os.environ if env is None else env)
        folder = str(Path.cwd() if cwd is None else Path(cwd).absolute())
        closed: list[int] = []  # the child's ends of pipes
        self.stdin, child_stdin = _stream(stdin, 0, text, closed)
        self.stdout, child_stdout = _stream(stdout, 1, text, closed)
        both = stderr == subprocess.STDOUT
        self.stderr, child_stderr = (None, child_stdout) if both else _stream(stderr, 2, text, closed)
        try:
            if _is_forkable(self.args, environment):
                settings = {"command": self.args[1:], "folder": folder, "session": start_new_session}
                self._status, writer = os.pipe()
                closed.append(writer)
                _server().start(
                    {**settings, "environment": environment}, child_stdin, child_stdout, child_stderr, writer
                )
                os.close(closed.pop())
                data = os.read(self._status, NUMBER.size)
                assert data, "the server of processes has ended"
                self.pid = NUMBER.unpack(data)[0]
            else:
                self._popen = subprocess.Popen(
                    self.args, stdin=child_stdin, stdout=child_stdout, stderr=child_stderr, cwd=folder,
                    env=environment, start_new_session=start_new_session,
                )  # fmt: skip
                self.pid = self._popen.pid
        finally:
            for descriptor in closed:
                os.close(descriptor)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._popen is not None:
            self.returncode = self._popen.wait(timeout)
            return self.returncode
        with self._lock:
            if self.returncode is None:
                if not select.select([self._status], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                data = os.read(self._status, NUMBER.size)
                os.close(self._status)
                assert data, "the server of processes has ended"
                self.returncode = NUMBER.unpack(data)[0]
            return self.returncode

    def send_signal(self, number: int, *, session: bool = False) -> None:
        """Send a signal to the command, or to all processes of the session that it leads; after its end to none."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since
                (os.killpg if session else os.kill)(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """The output of the command to pipes, at its end; may be called again after a timeout."""
        end = None if timeout is None else time.monotonic() + timeout
        files = [file for file in (self.stdout, self.stderr) if file is not None]
        for file in files:
            if file not in self._readers:
                self._readers[file] = threading.Thread(target=self._read_all, args=(file,), daemon=True)
                self._readers[file].start()
        if self.stdin is not None and not self.stdin.closed:
            with suppress(BrokenPipeError):
                if input:
                    self.stdin.write(input)
                self.stdin.close()
        for file in files:
            self._readers[file].join(None if end is None else max(0.0, end - time.monotonic()))
            if self._readers[file].is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        for file in files:
            file.close()
        return self._read.get(self.stdout), self._read.get(self.stderr)

    def _read_all(self, file: Any) -> None:
        self._read[file] = file.read()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, error: object, *_: object) -> None:
        """Wait for its end. After an error of the test kill it first: it may wait for the test."""
        if error is not None:
            self.kill()  # before the files are closed: a thread may hold one until the command has ended
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                with suppress(BrokenPipeError):
                    file.close()
        self.wait()


def run(
    command: Sequence[object],
    *,
    input: Any = None,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    text: bool = False,
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Run a command to its end, with the arguments of `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    process = Process(command, text=text, **options)
    try:
        stdout, stderr = process.communicate(input, timeout)
    except BaseException:
        process.kill()
        process.wait()
        raise
    done = subprocess.CompletedProcess(process.args, process.wait(), stdout, stderr)
    if check:
        done.check_returncode()
    return done


@contextmanager
def rank_environments(world_size: int) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank with torchrun's variables. This process has the store of the ranks."""
    from torch.distributed import TCPStore

    # As with torchrun, the parent has the store of all groups, so that no free port is chosen in advance.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world_size)}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    yield [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    del store


def _stream(given: Any, number: int, text: bool, closed: list[int]) -> tuple[Any, int]:
    """This process's file for a standard stream that is a pipe, and the descriptor for the child."""
    if given is None:
        return None, number
    if given == subprocess.DEVNULL:
        closed.append(os.open(os.devnull, os.O_RDWR))
        return None, closed[-1]
    if given != subprocess.PIPE:
        return None, given if isinstance(given, int) else given.fileno()
    reader, writer = os.pipe()
    ours, theirs, mode = (writer, reader, "w") if number == 0 else (reader, writer, "r")
    closed.append(theirs)
    return (open(ours, mode) if text else open(ours, f"{mode}b")), theirs  # noqa: PTH123


def _is_forkable(command: list[str], environment: dict[str, str]) -> bool:
    """Whether a child of the server can replace a new interpreter."""
    if command[0] != sys.executable or len(command) < 2 or not hasattr(os, "pidfd_open"):
        return False
    if _sees_gpu(environment):
        return False
    is_program = command[1] in ("-c", "-m") if command[1].startswith("-") else True
    return is_program and read_at_start(environment) == _server().read_at_start


def _sees_gpu(environment: Mapping[str, str]) -> bool:
    """Whether a command may use a GPU: not in a fork of a process that has asked CUDA's driver for one."""
    return environment.get("CUDA_VISIBLE_DEVICES") != "" and Path("/dev/nvidiactl").exists()


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `AT_START`; a command is forked if they are those of the server."""
    # torch sets the first one itself, at the first use of its compiler, and reads it at each use; OpenCV sets the
    # second one when it is imported.
    late = "TORCHINDUCTOR_CACHE_DIR", "LD_LIBRARY_PATH"
    return {
        name: value for name, value in environment.items() if name.startswith(AT_START) and name not in late
    }


@cache
def _server() -> "Server":
    return Server()


class Server:
    """This process's end of the connection to the process that forks.

    All processes of a test run use the same one, which the first of them starts.
    """

    def __init__(self) -> None:
        # Set by xdist, for all processes of a run.
        name = f"sa1b-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = (
            None  # the server, or None if another process started it
        )
        while True:
            self._connection = socket.socket(socket.AF_UNIX)
            try:
                self._connection.connect(f"\0{name}")
                found = json.loads(_receive(self._connection, _receive_number(self._connection)))
                break
            except (ConnectionError, EOFError):  # none yet, or it is about to end
                self._connection.close()
            if self._process is None or self._process.poll() is not None:
                # Of several that start at the same time, one gets the name and the others end.
                command = [sys.executable, "-m", "tests.processes", name]
                self._process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL)
            time.sleep(0.02)
        atexit.register(self._leave)
        self.pid: int = found["pid"]
        self.read_at_start: dict[str, str] = found["read_at_start"]

    def _leave(self) -> None:
        self._connection.close()
        if self._process is not None:
            self._process.returncode = 0  # not waited for: it ends after its last client

    def start(self, settings: dict[str, Any], *descriptors: int) -> None:
        data = json.dumps(settings).encode()
        with self._lock:
            socket.send_fds(self._connection, [NUMBER.pack(len(data))], descriptors)
            self._connection.sendall(data)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _receive_number(connection: socket.socket) -> int:
    return int(NUMBER.unpack(_receive(connection, NUMBER.size))[0])


def _welcome(listener: socket.socket, greeting: bytes) -> socket.socket | None:
    """The next connection, after the greeting was sent; None if it is of another user."""
    connection, _ = listener.accept()
    owner = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
    if owner != os.getuid():
        connection.close()
        return None
    connection.sendall(NUMBER.pack(len(greeting)) + greeting)
    return connection


def _serve(listener: socket.socket, greeting: bytes) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request and report how it ended. Returns in the forked process.

    A request has four descriptors: the standard streams of the command, and the pipe for its pid and exit code.
    Each client is sent the greeting first. The server ends when its last client has closed its connection.
    """
    connections: dict[int, socket.socket] = {}
    children: dict[int, tuple[int, int]] = {}  # by descriptor of the process: pid, pipe
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == listener.fileno():
                if (connection := _welcome(listener, greeting)) is not None:
                    connections[connection.fileno()] = connection
                    poll.register(connection, select.POLLIN)
            elif ready in connections:
                connection = connections[ready]
                header, streams, _, _ = socket.recv_fds(connection, NUMBER.size, 4)
                if not header:
                    poll.unregister(ready)
                    connections.pop(ready).close()
                    if not connections:
                        os._exit(0)
                    continue
                data = _receive(connection, NUMBER.unpack(header)[0])
                status = streams.pop()
                pid = os.fork()
                if pid == 0:
                    for other in (listener, *connections.values()):
                        other.close()
                    for descriptor in (status, *children, *(pipe for _, pipe in children.values())):
                        os.close(descriptor)
                    return json.loads(data), streams
                for descriptor in streams:
                    os.close(descriptor)
                with suppress(BrokenPipeError):  # the client was killed
                    os.write(status, NUMBER.pack(pid))
                child = os.pidfd_open(pid)
                children[child] = (pid, status)
                poll.register(child, select.POLLIN)
            else:
                pid, status = children.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):
                    os.write(status, NUMBER.pack(code))
                os.close(status)


def _become(settings: dict[str, Any], streams: list[int]) -> None:
    """Run the command in this process, which was forked for it."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if settings["session"]:
        os.setsid()
    os.chdir(settings["folder"])
    os.environ.clear()
    os.environ.update(settings["environment"])
    faulthandler.enable()  # a child that dies says where
    tempfile.tempdir = None  # look up TMPDIR again
    forked_workers.use_fork()
    vars(multiprocessing.process)["ORIGINAL_DIR"] = settings["folder"]
    multiprocessing.process.current_process().authkey = os.urandom(32)
    first, *words = settings["command"]
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(words[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv, sys.path[0] = ["-m", *words[1:]], settings["folder"]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [first, *words], str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def _of_the_package() -> Iterator[str]:
    """All modules but those that need packages which a machine may lack."""
    for one in pkgutil.walk_packages([str(REPOSITORY / "sa1b")], "sa1b."):
        if not re.search(r"_triton$|\.integrations|__main__|lightning|ray_tasks", one.name):
            yield one.name


def _use_huge_pages() -> None:
    """Put this process's memory in pages of 2 MB, which halves the time of its forks. Older kernels refuse it."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, kind, _, _, inode = line.split()[:5]
        start, end = (int(address, 16) >> 21 for address in addresses.split("-"))
        if kind == "rw-p" and inode == "0" and end > start + 1:
            address, length = start + 1 << 21, end - start - 1 << 21
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), 25)  # MADV_COLLAPSE


def _end(settings: dict[str, Any], streams: list[int]) -> NoReturn:
    """Run the command and end this process like the interpreter, but without destroying its modules.

    Destroying them would take 1.4 s of processor time, mostly for copies of memory shared with the server.
    """
    code = 0
    try:
        _become(settings, streams)
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.excepthook(*sys.exc_info())
        code = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            code = -signal.SIGINT
    threading._shutdown()  # waits for the other threads
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            code = 120  # Python's code if the last output cannot be written
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    requests = socket.socket(socket.AF_UNIX)
    try:
        requests.bind(f"\0{sys.argv[1]}")
    except OSError:  # another one was faster
        sys.exit()
    requests.listen(64)  # clients wait while this process imports
    # Before the imports, which may set variables.
    about = json.dumps({"pid": os.getpid(), "read_at_start": read_at_start(os.environ)}).encode()
    gc.disable()
    for name in (*PRELOADED, *_of_the_package()):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a child's collections do not copy the memory of these modules
    gc.enable()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # what the server made is not for its children to remove
    _use_huge_pages()
    _end(*_serve(requests, about))
