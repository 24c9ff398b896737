"""`pytest --processes N`: the tests in N forks of the process that has collected them.

To import the package and to collect the tests takes 17 s of processor time and 700 MB. A fork has both already,
shared. A fork takes the tests of one file after the other, so that fixtures of a module are made once. Its
reports go through a pipe to the parent, which prints and counts them. If a fork dies, the test that it ran has
failed, and another fork takes the other tests of the file.
"""

import os
import signal
import sys
import traceback
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import cv2
import pytest

# Rooms whose tests start several ranks: first, so that no long file is left at the end.
FIRST = ("tests/engine/", "tests/train/", "tests/examples/", "tests/ingest/", "tests/docs/")
Group = list[pytest.Item]


class _Reports:
    """In a fork: what plugins of the parent shall hear of."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.pipe.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.pipe.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("pytest_runtest_logreport", data))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if when != "runtest":  # an earlier one, which the parent has seen
            return
        about, more = warning_message, {"when": when, "nodeid": nodeid, "location": location}
        kind = about.category if about.category.__module__ == "builtins" else UserWarning  # can be pickled
        found = warnings.WarningMessage(kind(str(about.message)), kind, about.filename, about.lineno)
        self.pipe.send(("pytest_warning_recorded", {"warning_message": found, **more}))


class Fork:
    """A process that runs groups of tests, seen from the parent."""

    def __init__(self, session: pytest.Session, groups: list[Group], number: int) -> None:
        self.pipe, theirs = Pipe()
        threads = cv2.getNumThreads()
        cv2.setNumThreads(1)  # ends OpenCV's threads, for which a fork would wait for ever
        self.groups: list[int] = []  # given to it and not ended
        self.ended: set[str] = set()  # names of tests
        self.current: tuple[str, Any] | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        cv2.setNumThreads(threads)  # again, the threads start when they are needed
        if self.pid == 0:
            self.pipe.close()
            _work(session, groups, number, theirs)
        theirs.close()

    def end(self) -> int:
        """Its exit code, after it was killed if it still runs."""
        self.pipe.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _work(session: pytest.Session, groups: list[Group], number: int, pipe: Connection) -> NoReturn:
    try:
        manager = session.config.pluginmanager
        manager.unregister(name="terminalreporter")
        capture: Any = manager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the parent
        capture.start_global_capturing()
        capture.suspend_global_capture()
        factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"process-{number}"
        factory._basetemp.mkdir(mode=0o700)
        manager.register(_Reports(session.config, pipe))
        for item, following in _pairs(groups, pipe):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        pipe.send(("ended", {}))
    except BaseException:  # Ctrl-C, an error of a plugin
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _pairs(groups: list[Group], pipe: Connection) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Each test and the one after it, whose fixtures are kept."""

    def items() -> Iterator[pytest.Item]:
        while True:
            pipe.send(("next", {}))
            skipped, index = pipe.recv()
            if index is None:
                return
            yield from (item for item in groups[index] if item.nodeid not in skipped)

    one = None
    for following in items():
        if one is not None:
            yield one, following
        one = following
    if one is not None:
        yield one, None


def _died(item: pytest.Item, code: int) -> pytest.TestReport:
    said = signal.Signals(-code).name if code < 0 else f"code {code}"

    def fail() -> NoReturn:
        pytest.fail(f"{item.nodeid}: its process ended with {said}", pytrace=False)

    return pytest.TestReport.from_item_and_call(item, pytest.CallInfo.from_call(fail, "call"))


class Run:
    """The forks of one run, seen from the parent."""

    def __init__(self, session: pytest.Session, groups: list[Group], processes: int) -> None:
        self.session, self.groups = session, groups
        self.waiting = list(range(len(groups)))
        self.started = 0
        self.skipped: dict[int, set[str]] = {}  # of groups whose process died: tests that have ended
        self.forks: dict[Connection, Fork] = {}
        for _ in range(min(processes, len(groups))):
            self.start()

    def start(self) -> None:
        fork = Fork(self.session, self.groups, self.started)
        self.started += 1
        self.forks[fork.pipe] = fork

    def until_end(self) -> None:
        try:
            while self.forks:
                for pipe in wait(list(self.forks)):
                    self.receive(self.forks[pipe])  # type: ignore[index]
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)
                if self.session.shouldstop:
                    raise self.session.Interrupted(self.session.shouldstop)
        finally:
            for fork in self.forks.values():
                fork.end()

    def receive(self, fork: Fork) -> None:
        try:
            kind, content = fork.pipe.recv()
        except (EOFError, OSError):
            self.lost(fork)
            return
        config = self.session.config
        if kind == "next":
            index = self.waiting.pop(0) if self.waiting else None
            if index is not None:
                fork.groups.append(index)
            fork.pipe.send((self.skipped.get(index, set()) if index is not None else set(), index))
        elif kind == "ended":
            del self.forks[fork.pipe]
            os.waitpid(fork.pid, 0)
            fork.pipe.close()
        elif kind == "pytest_runtest_logreport":
            report = config.hook.pytest_report_from_serializable(config=config, data=content)
            config.hook.pytest_runtest_logreport(report=report)
        elif kind == "pytest_warning_recorded":
            config.hook.pytest_warning_recorded.call_historic(kwargs=content)
        else:
            starts = kind == "pytest_runtest_logstart"
            fork.current = content["nodeid"] if starts else None
            if not starts:
                fork.ended.add(content["nodeid"])
            getattr(config.hook, kind)(**content)

    def lost(self, fork: Fork) -> None:
        """A fork has died: its test failed, and the others of its files are run by another one."""
        del self.forks[fork.pipe]
        fork.pipe.close()
        code = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        for index in fork.groups:
            for item in self.groups[index]:
                if item.nodeid == fork.current:
                    self.session.config.hook.pytest_runtest_logreport(report=_died(item, code))
                    fork.ended.add(item.nodeid)
            if any(item.nodeid not in fork.ended for item in self.groups[index]):
                self.skipped[index] = self.skipped.get(index, set()) | fork.ended
                self.waiting.insert(0, index)
        if fork.current is None:  # not by a test: it would happen again
            raise pytest.PytestWarning(f"a process of the tests ended with {code}")
        if self.waiting:
            self.start()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forks, if they are asked for."""
    config = session.config
    if config.option.processes < 2 or config.option.collectonly or session.testsfailed:
        return None
    by_file: dict[str, Group] = {}
    for item in session.items:
        by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    groups = sorted(by_file.values(), key=lambda items: not items[0].nodeid.startswith(FIRST))
    os.environ["SA1B_TEST_RUN"] = uuid.uuid4().hex  # all forks use one server of processes
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    Run(session, groups, config.option.processes).until_end()
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--processes`."""
    text = "run the tests in so many forks of the process that has collected them (1)"
    parser.addoption("--processes", type=int, default=1, metavar="N", help=text)
