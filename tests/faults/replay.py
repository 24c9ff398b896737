"""The possible states of a folder after a loss of power, from the log that faults.c records.

A crash at operation k keeps everything that was flushed before k. All other changes may or may not be kept.
Unflushed bytes of a file are present, missing, truncated or zero. Each unflushed change of a folder (a
created, renamed or removed file) is present or missing, in any order. There are only two guarantees: a rename
never loses both names, and flushing either of its folders keeps it.

    log = read_log(path)
    State(before, log[:k]).crash(random.Random(seed)).write(folder)
"""

import copy
import os
import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

CREATE, WRITE, TRUNCATE, SYNC, MKDIR, RENAME, UNLINK, RMDIR, LINK, SYNC_ALL = range(1, 11)
NAMES = {
    CREATE: "create",
    WRITE: "write",
    TRUNCATE: "truncate",
    SYNC: "sync",
    MKDIR: "mkdir",
    RENAME: "rename",
    UNLINK: "unlink",
    RMDIR: "rmdir",
    LINK: "link",
    SYNC_ALL: "sync_all",
}
_ENTRY = struct.Struct("<IIIQQQ")
HOURS_LATER = 6 * 3600  # seconds, so that every heartbeat has expired when the machine restarts
DATA_MODES = ("all", "none", "prefix", "zeros")


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the log; paths are relative to the recorded folder."""

    kind: int
    inode: int
    first: PurePosixPath
    second: PurePosixPath
    offset: int
    length: int
    data: bytes

    def __str__(self) -> str:
        what = f"{NAMES[self.kind]} {self.first}"
        return what + (f" -> {self.second}" if self.kind in (RENAME, LINK) else f" (inode {self.inode})")


def read_log(log: Path, folder: Path) -> list[Operation]:
    """The operations recorded below `folder`."""
    stored = log.read_bytes()
    found = []
    position = 0

    def relative(path: bytes) -> PurePosixPath:
        text = path.decode()
        return (
            PurePosixPath(text).relative_to(folder) if text.startswith(str(folder)) else PurePosixPath(text)
        )

    while position < len(stored):
        kind, first, second, inode, offset, length = _ENTRY.unpack_from(stored, position)
        position += _ENTRY.size
        paths = []
        for size in (first, second):
            paths.append(relative(stored[position : position + size]))
            position += size
        size = length if kind == WRITE else 0
        found.append(Operation(kind, inode, *paths, offset, length, stored[position : position + size]))
        position += size
    return found


@dataclass(slots=True, eq=False)
class Node:
    """A file or a folder after the operations, with their numbers.

    Attributes:
        synced: number of the last flush; -1: none. Earlier contents count as flushed.
        live: for a folder: name -> node, after all operations.
        changes: for a folder: (operation, name, node or None) in order.
        writes: for a file: (operation, offset, bytes); offset -1: truncated to len(bytes).
    """

    is_folder: bool
    synced: int = -1
    live: dict[str, "Node"] = field(default_factory=dict)
    changes: list[tuple[int, str, "Node | None"]] = field(default_factory=list)
    writes: list[tuple[int, int, bytes | int]] = field(default_factory=list)

    def change(self, number: int, name: str, node: "Node | None") -> None:
        self.changes.append((number, name, node))
        if node is None:
            self.live.pop(name, None)
        else:
            self.live[name] = node


def scan(folder: Path) -> tuple[Node, dict[int, Node]]:
    """The current contents of a folder, all flushed, and its nodes by inode."""
    by_inode: dict[int, Node] = {}

    def visit(path: Path) -> Node:
        node = Node(path.is_dir())
        by_inode[path.stat().st_ino] = node
        if node.is_folder:
            for child in sorted(path.iterdir()):
                node.change(-1, child.name, visit(child))
        else:
            node.writes.append((-1, 0, path.read_bytes()))
        return node

    return visit(folder), by_inode


Kept = dict[str, bytes | None]  # path -> content, None: a folder


class State:
    """A folder after all operations of a log; `crash` returns a state that a loss of power may leave."""

    def __init__(self, before: tuple[Node, dict[int, Node]], operations: Sequence[Operation]) -> None:
        self._root, self._by_inode = copy.deepcopy(before)
        self._renames: dict[int, tuple[Node, Node]] = {}
        self._count = len(operations)
        for number, operation in enumerate(operations):
            self._do(number, operation)

    def _parent(self, path: PurePosixPath) -> Node:
        node = self._root
        for part in path.parts[:-1]:
            node = node.live[part]
        return node

    def _do(self, number: int, operation: Operation) -> None:
        kind, first, second = operation.kind, operation.first, operation.second
        if kind in (CREATE, MKDIR):
            if not first.parts:  # the recorded folder itself
                return
            parent = self._parent(first)
            if first.name not in parent.live:
                node = Node(kind == MKDIR)
                self._by_inode[operation.inode] = node
                parent.change(number, first.name, node)
        elif kind == WRITE:
            self._by_inode[operation.inode].writes.append((number, operation.offset, operation.data))
        elif kind == TRUNCATE:
            self._by_inode[operation.inode].writes.append((number, -1, operation.length))
        elif kind == SYNC:
            self._by_inode[operation.inode].synced = number
        elif kind == SYNC_ALL:
            for node in self._by_inode.values():
                node.synced = number
        elif kind in (UNLINK, RMDIR):
            self._parent(first).change(number, first.name, None)
        elif kind == LINK:
            self._parent(second).change(number, second.name, self._parent(first).live[first.name])
        else:
            source, target = self._parent(first), self._parent(second)
            node = source.live[first.name]
            self._renames[number] = source, target
            source.change(number, first.name, None)
            target.change(number, second.name, node)

    def everything(self) -> Kept:
        """The folder if all operations are kept."""
        return self._collect(lambda _folder, _number: True, lambda _node: "all", random.Random(0))

    def crash(self, rng: random.Random) -> Kept:
        """A possible state of the folder after a loss of power that follows the last operation."""
        mode = rng.choice(["lose", "lose", "some", "some", "keep", "until"])
        until = rng.randrange(self._count + 1)
        coins: dict[int, bool] = {}

        def coin(number: int) -> bool:
            if mode == "some":
                return coins.setdefault(number, rng.random() < 0.5)
            return mode == "keep" or (mode == "until" and number < until)

        def kept(folder: Node, number: int) -> bool:
            if folder.synced > number or coin(number):
                return True
            if number not in self._renames:
                return False
            source, target = self._renames[number]
            if source.synced > number:  # otherwise the file would have neither name
                return True
            return target.synced > number and folder is source and coin(-1 - number)

        modes = {"lose": ("none",), "keep": DATA_MODES}.get(mode, DATA_MODES)
        return self._collect(kept, lambda _node: rng.choice(modes), rng)

    def _collect(
        self, kept: Callable[[Node, int], bool], mode_of: Callable[[Node], str], rng: random.Random
    ) -> Kept:
        found: Kept = {}
        contents: dict[int, bytes] = {}

        def visit(folder: Node, path: PurePosixPath) -> None:
            entries: dict[str, Node] = {}
            for number, name, node in folder.changes:
                if number >= 0 and not kept(folder, number):
                    continue
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node
            for name, node in entries.items():
                if node.is_folder:
                    found[str(path / name)] = None
                    visit(node, path / name)
                else:
                    if id(node) not in contents:
                        contents[id(node)] = content(node, mode_of(node), rng)
                    found[str(path / name)] = contents[id(node)]

        visit(self._root, PurePosixPath())
        return found


def content(node: Node, mode: str, rng: random.Random) -> bytes:
    """A file's bytes after a crash: the flushed bytes, and the others according to the mode."""
    data = bytearray()
    loose = sum(number > node.synced for number, _, _ in node.writes)
    keep = {"all": loose, "none": 0, "zeros": loose}.get(mode, rng.randrange(loose + 1))
    for i, (number, offset, written) in enumerate(node.writes):
        if number > node.synced and i - (len(node.writes) - loose) >= keep:
            break
        if isinstance(written, int):
            data[written:] = bytes(max(0, written - len(data)))
            continue
        is_zeros = mode == "zeros" and number > node.synced
        data.extend(bytes(max(0, offset - len(data))))
        data[offset : offset + len(written)] = bytes(len(written)) if is_zeros else written
    return bytes(data)


def write(kept: Kept, folder: Path) -> None:
    """Write the folder to this disk, with times that are hours old."""
    folder.mkdir(parents=True)
    for name, data in kept.items():
        path = folder / name
        if data is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    then = time.time() - HOURS_LATER
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (then, then))
