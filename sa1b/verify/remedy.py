"""Repairs of a dataset directory: the shortest command for each kind of damage."""

import shlex
from dataclasses import dataclass

from sa1b.console import command
from sa1b.shards.manifest import Options


@dataclass(frozen=True, slots=True)
class Remedy:
    """Commands for one dataset directory.

    Attributes:
        root: path or URL of the dataset directory.
        options: options of the dataset; None: unknown.
        folders: names of sources that are folders of pairs; others are treated as tars.
    """

    root: str
    options: Options | None = None
    folders: frozenset[str] = frozenset()

    def index(self, shard: str) -> str:
        """Remedy for a damaged index of one shard."""
        return f"`{command('index')} {self._quoted(shard)}` (first restore the shard if it is damaged too)"

    def tables(self) -> str:
        """Remedy if only the sample table, rows of a source or dataset.json are damaged."""
        return f"`{command('index')} {self._quoted()} --tables`"

    def everything(self) -> str:
        """Remedy if only the shards are intact."""
        return f"`{command('index')} {self._quoted()}`"

    def source(self, source: str | None) -> str:
        """Remedy for damage that needs the source again: of a shard, a task file or refused members."""
        name = source or "SOURCE"
        # --redo replaces the files after the source has been read, so the user removes nothing first. The
        # placeholder has no meaning in a shell: the unedited command only reports a missing file.
        path = shlex.quote(f"PATH/TO/{name}" if name in self.folders else f"PATH/TO/{name}.tar")
        flags = "".join(f" {flag}" for flag in self.flags())
        again = f"{command('reshard')} {path} --out {self._quoted()} --redo {shlex.quote(name)}{flags}"
        return f"restore it from a copy; or, with the real path of the source, `{again}`"

    def flags(self) -> list[str]:
        """The flags of `sa1b reshard` that differ from its defaults."""
        if self.options is None:
            return []
        defaults, flags = Options().flags(), self.options.flags()
        return [flags[name] for name in flags if flags[name] != defaults[name]]

    def _quoted(self, name: str = "") -> str:
        return shlex.quote(f"{self.root}/{name}" if name else self.root)
