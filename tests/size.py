"""How large the package is, and how far data travels in it: `python -m tests.size`, the same as `make size`.

Lines, files, share of docstrings, circles of imports, rooms by size, and for each route the files that data
enters and its returns. Local imports and those for type checkers count. The budgets are in pyproject.toml,
`[tool.sa1b.budget]`; tests/test_size.py holds them. A budget is raised only with a reason in the commit.

A route is one task, traced: the files of the package whose functions call each other. A return is a call of a
function in a file from which the caller itself was called, directly or through others: data that goes back.
"""

import ast
import shutil
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "sa1b"


class Text:
    """What the figures need of a Python file: all syntax trees together would take 100 MB.

    Attributes:
        docstring_lines: lines of its docstrings.
        imports: its imports, anywhere in the text.
    """

    def __init__(self, path: Path) -> None:
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        self.docstring_lines, self.imports = 0, list[ast.Import | ast.ImportFrom]()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds) and ast.get_docstring(node, clean=False):
                self.docstring_lines += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.imports.append(node)


text_of = cache(Text)


@cache
def modules() -> dict[str, Text]:
    """Name of a module -> what is known of it."""
    found: dict[str, Text] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = text_of(path)
    return found


def lines(folder: Path) -> int:
    """Lines of all Python files of a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def docstring_lines() -> int:
    """Lines of docstrings in the package."""
    return sum(text.docstring_lines for text in modules().values())


def imports() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports, anywhere in its text."""
    graph: dict[str, set[str]] = {}
    for name, text in modules().items():
        graph[name] = set()
        for node in text.imports:
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & modules().keys()
            else:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    graph[name] |= {whole if whole in modules() else str(node.module)} & modules().keys()
    del graph["sa1b"]  # public names, imported on use
    return {name: targets - {"sa1b", name} for name, targets in graph.items()}


def circles() -> list[list[str]]:
    """Groups of modules each of which imports all others, directly or through others."""
    graph = imports()
    reached = {name: _reached(graph, name) for name in graph}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found


def rooms() -> dict[str, int]:
    """Lines of each room: folders of the package, each program, and what lies beside the package; docs/ in Markdown."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        depth = 2 if parts[0] == "programs" and len(parts) > 2 else 1
        room = "/".join(parts[:depth]) if len(parts) > 1 else "train.py" if parts == ("train.py",) else "root"
        found[room] += len(path.read_text().splitlines())
    beside = {name: lines(REPOSITORY / name) for name in ("tools", "tests", "benchmarks", "examples")}
    documents = (REPOSITORY / "docs").rglob("*.md")
    return {**found, **beside, "docs": sum(len(path.read_text().splitlines()) for path in documents)}


class Route:
    """The calls between files of the package in the context, in this thread and in threads that start in it.

    Attributes:
        steps: file of the caller and of the called function, each pair once.
        returns: those whose called function is in a file from which its caller was called.
    """

    def __init__(self) -> None:
        self.steps: set[tuple[str, str]] = set()
        self.returns: set[tuple[str, str]] = set()

    def __enter__(self) -> "Route":
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *failure: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    @property
    def files(self) -> set[str]:
        """The files whose functions were called by other ones."""
        return {name for step in self.steps for name in step}

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (called := _file(frame)) is None:
            return
        callers, caller = [], frame.f_back
        while caller is not None:
            if (name := _file(caller)) is not None:
                callers.append(name)
            caller = caller.f_back
        if callers and callers[0] != called:
            self.steps.add((callers[0], called))
            if called in callers:
                self.returns.add((callers[0], called))


def _file(frame: FrameType) -> str | None:
    path = frame.f_code.co_filename
    return path.removeprefix(f"{PACKAGE}/") if path.startswith(f"{PACKAGE}/") else None


def routes(folder: Path) -> dict[str, Route]:
    """Name of a route -> its calls, for one small task."""
    import torch

    import sa1b
    from sa1b.engine.checkpoint.checkpoints import Checkpoints
    from sa1b.engine.settings import CheckpointConfig
    from sa1b.ingest.ingest import Policy, ingest
    from sa1b.masks import area
    from sa1b.shards.documents import Options
    from sa1b.sources.discovery import discover
    from tests.engine.small_run import SmallRun
    from tests.shards.tiny_source import ROOTS, make_root, pairs, write_source
    from tests.storage.service import Service

    source = write_source(folder / "sa_000001.tar", pairs(range(100, 104)))
    root = make_root(folder / "warm", [source], ROOTS["plain"])
    found: dict[str, Route] = {}
    (folder / "root").mkdir()
    options = Options(images_per_shard=5)
    (again,) = discover([source]).sources
    with Route() as found["member to shard"]:
        ingest(again, folder / "root", options, Policy(), report=lambda counts: None)
    dataset = sa1b.open(root)
    area(dataset[0].runs)
    with Route() as found["record to runs"]:
        area(dataset[1].runs)
    stream = iter(sa1b.Stream(root, global_batch=1, image_size=64, masks=2))
    next(stream)
    with Route() as found["sample to device"]:
        next(stream).to(torch.device("cpu"))
    run, settings = SmallRun(), CheckpointConfig()
    with Route() as found["save and resume"]:
        for step in (1, 2):
            checkpoints = Checkpoints(folder / "run", settings)
            checkpoints.resume(run.model, run.optimizer)
            checkpoints.save(step, run.model, run.optimizer, {})
            checkpoints.close()
    shutil.copytree(root, folder / "data" / "root")
    with Service("range_server", folder) as service:
        options = {"anon": True, "endpoint_url": f"http://127.0.0.1:{service.port}"}
        remote = sa1b.open("s3://data/root", storage_options=options)
        remote[0].jpeg  # noqa: B018
        with Route() as found["URL to bytes"]:
            remote[1].jpeg  # noqa: B018
    return found


def reached(start: str) -> set[str]:
    """The modules that an import of a module reaches, with imports inside functions, and itself."""
    graph, found, waiting = imports(), {start}, [start]
    while waiting:
        for name in graph.get(waiting.pop(), set()) - found:
            found.add(name)
            waiting.append(name)
    return found


def figures() -> dict[str, int]:
    """What the budgets limit, by the names in pyproject.toml."""
    of_training = [REPOSITORY.joinpath(*name.split(".")) for name in reached("sa1b.train")]
    paths = [path / "__init__.py" if path.is_dir() else path.with_suffix(".py") for path in of_training]
    return {
        "lines": lines(PACKAGE),
        "files": len(modules()),
        "docstring_lines": docstring_lines(),
        "circles": len(circles()),
        "files_of_training": len(paths),
        "lines_of_training": sum(len(path.read_text().splitlines()) for path in paths),
    }


def budgets() -> dict[str, Any]:
    """The budgets in pyproject.toml; `rooms` has the ceiling of each room."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    found: dict[str, Any] = settings["tool"]["sa1b"]["budget"]
    return found


def main() -> None:
    """Print all figures."""
    limits = budgets()
    for name, value in figures().items():
        print(f"{name.replace('_', ' '):18}{value:8,}   budget {limits[name]:,}")
    for group in circles():
        print(f"  circle: {', '.join(group)}")
    print()
    for room, count in sorted(rooms().items(), key=lambda one: -one[1]):
        print(f"{room:34}{count:8,}   ceiling {limits['rooms'].get(room, 0):,}")
    print(f"\n{'route':22}{'files':>7}{'returns':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for name, route in routes(Path(folder)).items():
            print(f"{name:22}{len(route.files):7}{len(route.returns):9}")
            for caller, called in sorted(route.returns):
                print(f"  {caller} calls {called}")


if __name__ == "__main__":
    main()
