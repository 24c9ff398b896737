"""The list of the layers of a dataset directory."""

from dataclasses import dataclass, field
from typing import Any

from sa1b.console import command
from sa1b.errors import ManifestError
from sa1b.report import aligned
from sa1b.shards.dataset import Dataset
from sa1b.shards.documents import LayerInfo
from sa1b.shards.layer import layer_names, read_info
from sa1b.storage.open import open_store


@dataclass(slots=True)
class LayerList:
    """The layers of a dataset directory."""

    root: str
    layers: list[LayerInfo] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)  # name -> message

    def document(self) -> dict[str, Any]:
        """The list as a JSON document."""
        layers = [
            {
                "name": one.name,
                "digest": one.digest,
                "images": one.images,
                "added": one.added,
                "replaced": one.replaced,
                "hidden": one.hidden,
                "bytes": one.masks.bytes + one.index.bytes,
                "parent": None if one.parent is None else one.parent.name,
                "provenance": one.provenance,
            }
            for one in self.layers
        ]
        return {"layers": layers, "unfinished": self.unfinished, "damaged": self.damaged}

    def table(self) -> str:
        """The list as text."""
        rows: list[tuple[str, ...]] = []
        rows.append(("name", "digest", "images", "added", "replaced", "hidden", "on", "made"))
        for one in self.layers:
            numbers = (f"{n:,}" for n in (one.images, one.added, one.replaced, one.hidden))
            above = "-" if one.parent is None else one.parent.name
            rows.append((one.name, one.digest[:12], *numbers, above, str(one.provenance.get("date", "-"))))
        lines = aligned(rows, right=(False, False, True, True, True, True, False, False))
        again = f"run `{command('layer')} add` with the same name again, or `{command('layer')} drop`"
        lines += [f"unfinished {name}: its command was stopped; {again}" for name in self.unfinished]
        lines += [f"damaged {message}" for message in self.damaged.values()]
        return "\n".join(lines) if len(lines) > 1 else f"{self.root}: no layers"


def list_layers(root: str) -> LayerList:
    """The layers of a dataset directory, complete or not."""
    store = open_store(Dataset(root).root)
    found = LayerList(root)
    for name, is_complete in layer_names(store).items():
        try:
            if is_complete:
                found.layers.append(read_info(store.reader, name))
            else:
                found.unfinished.append(name)
        except ManifestError as error:
            found.damaged[name] = str(error)
    return found
