"""Members that wait for their partner: in memory up to a limit, then one file each."""

from pathlib import Path


class Spill:
    """Bytes by name, each put once and taken once; the space is free again as soon as one is taken."""

    def __init__(self, folder: Path, memory_bytes: int) -> None:
        self._folder = folder
        self._left = memory_bytes
        self._memory: dict[str, bytes] = {}
        self._files: set[str] = set()

    def put(self, name: str, data: bytes) -> None:
        """Keep `data` under `name`, a plain file name."""
        if len(data) <= self._left:
            self._left -= len(data)
            self._memory[name] = data
            return
        if not self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_bytes(data)
        self._files.add(name)

    def take(self, name: str) -> bytes | None:
        """The bytes kept under `name`, now forgotten here; None if there are none."""
        data = self._memory.pop(name, None)
        if data is not None:
            self._left += len(data)
        elif name in self._files:
            path = self._folder / name
            data = path.read_bytes()
            path.unlink()
            self._files.remove(name)
        return data

    def names(self) -> list[str]:
        """What still waits, sorted."""
        return sorted(self._memory.keys() | self._files)
