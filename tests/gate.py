"""Which tests are `gate`: those that speak to the package only through names of public.txt, the command line and files.

A test is one if all that it reaches in tests/ and benchmarks/, through calls, fixtures, constants and programs
(`-m tests.x.y`, `-c "..."`), imports from `sa1b` only public names and patches nothing of the package. The syntax
trees of the files say so: nobody marks a test. `python -m tests.gate` prints the number of each room, and with names
of test files or tests what keeps each from being one.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
PUBLIC = frozenset((TESTS / "public.txt").read_text().split())
_PATCHES = frozenset(("patch", "object", "setattr", "delattr", "dict", "multiple", "setitem"))
_IMPORT = re.compile(r"(?:^|[\n;])\s*(?:from\s+([\w.]+)\s+import\s+\(?([\w, ]+)|import\s+([\w.]+))")
_FOLLOWED = ("tests", "benchmarks")
_COMMANDS = ("sa1b", "sa1b.train", "sa1b/train.py", "tools/reshard.py", "tools/demo.py")
# Modules that only load code of the package in advance, so that processes of tests start faster.
_IN_ADVANCE = ("tests.warm_up", "tests.train.preloaded")


@dataclass
class Part:
    """A function, class or constant of a file, or a statement beside them: what it refers to."""

    names: set[str] = field(default_factory=set)  # dotted, as written: "tiny.make_tar"
    fixtures: set[str] = field(default_factory=set)
    imports: dict[str, str] = field(default_factory=dict)  # its own: name -> dotted
    patched: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)  # modules that a string runs or imports
    is_command: bool = False  # it has words of a command line of the package
    is_autouse: bool = False


class File:
    """What is known of a Python file.

    Attributes:
        parts: name of a top-level definition -> what it refers to; "" for other statements.
        tests: names of its tests, as in a node id without parameters.
        module: the module's name.
    """

    def __init__(self, path: Path) -> None:
        self.module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        self.path, self.tests = path, dict[str, Part]()
        self.parts: dict[str, Part] = defaultdict(Part)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.parts[""].imports |= dict(_imported(node))
                continue
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                _read(node, self.parts["__main__"])  # of a program only
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names = [node.name]
            else:
                names = [
                    one.id
                    for one in ast.walk(node)
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
                ]
            for name in names or [""]:
                _read(node, self.parts[name])
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                outside = Part()
                for one in node.body:
                    if not isinstance(one, ast.FunctionDef) or not one.name.startswith("test"):
                        _read(one, outside)
                for one in node.body:
                    if isinstance(one, ast.FunctionDef) and one.name.startswith("test"):
                        part = self.tests[f"{node.name}::{one.name}"] = Part()
                        _read(one, part)
                        part.fixtures |= outside.fixtures
                        part.names |= outside.names
            elif (
                isinstance(node, ast.FunctionDef)
                and node.name.startswith("test")
                and path.name.startswith("test_")
            ):
                self.tests[node.name] = self.parts[node.name]


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for one in node.names:
        if isinstance(node, ast.ImportFrom):
            yield one.asname or one.name, f"{node.module}.{one.name}"
        else:
            yield (one.asname, one.name) if one.asname else (one.name.partition(".")[0],) * 2
            if "." in one.name:
                yield f" {one.name}", one.name


def _dotted(node: ast.AST) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _read(node: ast.AST, part: Part) -> None:
    """Add what a statement refers to."""
    inner = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    for one in ast.walk(node):
        if isinstance(one, ast.Import | ast.ImportFrom):
            part.imports |= dict(_imported(one))
        elif isinstance(one, ast.Attribute | ast.Name) and id(one) not in inner and (name := _dotted(one)):
            part.names.add(name)
        elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            part.fixtures |= {argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)}
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            if re.fullmatch(r"(tests|benchmarks)(\.\w+)+", one.value):
                part.programs.add(f"{one.value}.")
            part.is_command |= one.value in _COMMANDS
            for module, names, plain in _IMPORT.findall(one.value):
                part.programs |= (
                    {f"{module}.{name.strip()}" for name in names.split(",")} if module else {plain}
                )
        elif isinstance(one, ast.Call):
            name = _dotted(one.func).rpartition(".")[2]
            if name in _PATCHES and one.args:
                first = one.args[0]
                part.patched.add(str(first.value) if isinstance(first, ast.Constant) else _dotted(first))
            if name == "usefixtures":
                part.fixtures |= {str(x.value) for x in one.args if isinstance(x, ast.Constant)}
            if name == "fixture" and any(word.arg == "autouse" for word in one.keywords):
                part.is_autouse = True


@cache
def file_of(module: str) -> File | None:
    """The file of a module below tests/ or benchmarks/."""
    if module in _IN_ADVANCE:
        return None
    path = REPOSITORY.joinpath(*module.split("."))
    for one in (path.with_suffix(".py"), path / "__init__.py"):
        if module.startswith(_FOLLOWED) and one.exists():
            return File(one)
    return None


@cache
def _harness(path: Path) -> tuple[File, ...]:
    """The conftest files of a test file, the nearest first."""
    folders = [one for one in path.parents if one.is_relative_to(TESTS)]
    return tuple(File(one / "conftest.py") for one in folders if (one / "conftest.py").exists())


def is_public(name: str) -> bool:
    """Whether a dotted name of the package, or an attribute of a public name, is public."""
    parts = name.split(".")
    return any(".".join(parts[: i + 1]) in PUBLIC for i in range(1, len(parts)))


class Reach:
    """All that one test reaches.

    Attributes:
        private: names of the package that a gate test may not use -> who uses them.
        is_of_package: whether it uses a public name, or words of a command.
    """

    def __init__(self, file: File, name: str) -> None:
        self.private, self.is_of_package, self._seen = dict[str, str](), False, set[tuple[str, str]]()
        self._harness = _harness(file.path)
        self._follow(file, name, file.tests[name])
        for one in (file, *self._harness):
            for part_name, part in one.parts.items():
                if part.is_autouse or part_name in ("pytestmark", ""):
                    self._part(one, part_name)

    def _part(self, file: File, name: str) -> None:
        if name in file.parts:
            self._follow(file, name, file.parts[name])

    def _follow(self, file: File, name: str, part: Part) -> None:
        if (file.module, name) in self._seen:
            return
        self._seen.add((file.module, name))
        if name:
            self._part(file, "")
        who = f"{file.module}.{name}".rstrip(".")
        self.is_of_package |= part.is_command
        for written in part.names:
            self._name(file, part, written, who)
        for written in part.patched:
            found = written if written.startswith("sa1b.") else self._whole(file, part, written)
            if re.match(r"sa1b(\.|$)", found):
                self.private[found] = f"patched by {who}"
        for dotted in part.programs:
            self._dotted(dotted, who)
        for fixture in part.fixtures:
            for one in (file, *self._harness):
                if fixture in one.parts:
                    self._part(one, fixture)
                    break
                if (dotted := one.parts[""].imports.get(fixture, "")).startswith(_FOLLOWED):
                    self._dotted(dotted, who)
                    break

    def _whole(self, file: File, part: Part, written: str) -> str:
        head, _, rest = written.partition(".")
        dotted = part.imports.get(head) or file.parts[""].imports.get(head, "")
        return f"{dotted}.{rest}".rstrip(".") if dotted else ""

    def _name(self, file: File, part: Part, written: str, who: str) -> None:
        if dotted := self._whole(file, part, written):
            self._dotted(dotted, who)
        else:
            self._part(file, written.partition(".")[0])

    def _dotted(self, dotted: str, who: str) -> None:
        if dotted == "sa1b" or dotted.startswith("sa1b."):
            if dotted != "sa1b" and not is_public(dotted):
                self.private[dotted] = who
            self.is_of_package |= dotted != "sa1b"
            return
        if dotted.endswith("."):  # a program: all of it
            file = file_of(dotted[:-1])
            for name in list(file.parts) if file else ():
                self._part(file, name)
            return
        parts = dotted.split(".")
        for i in range(len(parts), 0, -1):
            if (file := file_of(".".join(parts[:i]))) is None:
                continue
            if i == len(parts):  # the module itself, of which attributes are taken elsewhere
                self._part(file, "")
            elif parts[i] in file.parts:
                self._part(file, parts[i])
            elif parts[i] in (imports := file.parts[""].imports):
                self._dotted(".".join([imports[parts[i]], *parts[i + 1 :]]), who)
            return


@cache
def private_names(path: Path) -> dict[str, dict[str, str]]:
    """Test of a file -> what keeps it from being a gate test -> by whom."""
    file, found = File(path), dict[str, dict[str, str]]()
    for name in file.tests:
        reach = Reach(file, name)
        found[name] = reach.private or ({} if reach.is_of_package else {"nothing of the package": "it"})
    return found


def is_gate(path: Path, name: str) -> bool:
    """Whether a test, "test_a" or "TestB::test_a", is a gate test."""
    return not private_names(path).get(name, {"unknown": ""})


def all_tests() -> Iterator[tuple[str, str, bool]]:
    """Room, "file::test" from tests/ on, and whether it is a gate test."""
    for path in sorted(TESTS.rglob("test_*.py")):
        relative = path.relative_to(TESTS)
        for name in private_names(path):
            yield (
                relative.parts[0] if len(relative.parts) > 1 else ".",
                f"{relative}::{name}",
                is_gate(path, name),
            )


def counts() -> Counter[str]:
    """Gate tests, without their parameters, of each room."""
    return Counter(room for room, _, gate in all_tests() if gate)


def main(words: Iterable[str]) -> None:
    """Print the figures, or what keeps tests from being gate tests."""
    if words:
        for word in words:
            name, _, test = word.partition("::")
            for one, private in private_names((REPOSITORY / name).resolve()).items():
                if test in ("", one):
                    print(one, *(f"    {what}  ({who})" for what, who in private.items()), sep="\n")
        return
    found, total = counts(), Counter(room for room, _, _ in all_tests())
    for room in sorted(total):
        print(f'"{room}" = {found[room]}  # of {total[room]}')
    print(f"# {found.total()} of {total.total()}")


if __name__ == "__main__":
    main(sys.argv[1:])
