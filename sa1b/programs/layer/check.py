"""The list of layers, and the verification of one: digests, every record, and the masks that it changes."""

from dataclasses import dataclass, field
from typing import Any

from sa1b.console import command, counted
from sa1b.errors import ManifestError, Sa1bError
from sa1b.masks.runs import MaskError
from sa1b.report import aligned, bar, first_lines
from sa1b.shards.dataset import Dataset
from sa1b.shards.documents import LayerInfo
from sa1b.shards.layer import layer_names, open_layers, read_info
from sa1b.shards.manifest import LAYERS
from sa1b.storage.cache import digest
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


@dataclass(slots=True)
class LayerCheck:
    """The result of the verification of a layer."""

    name: str
    images: int = 0
    problems: list[str] = field(default_factory=list)

    def exit_code(self) -> int:
        """0: intact; 1: there is a problem."""
        return 1 if self.problems else 0

    def document(self) -> dict[str, Any]:
        """The result as a JSON document."""
        code = {"exit_code": self.exit_code()}
        return {**code, "name": self.name, "images": self.images, "problems": self.problems}

    def table(self) -> str:
        """The result as text."""
        if not self.problems:
            return f"layer {self.name}: {counted(self.images, 'image')} verified, intact"
        return "\n".join([*first_lines(self.problems), f"layer {self.name}: {len(self.problems):,} problems"])


def verify_layer(root: str, name: str, *, quiet: bool = False) -> LayerCheck:
    """Verify the digests of a layer and apply every record to the stored masks of its image."""
    found = LayerCheck(name)
    dataset = Dataset(root)
    try:
        *parents, layer = open_layers(dataset.reader, dataset.table, [name])
    except ManifestError as error:
        found.problems.append(str(error))
        return found
    ids = layer.columns["image_id"].tolist()
    if (stored := digest(dataset.reader, layer.file)) != layer.info.masks.sha256:
        found.problems.append(
            f"{dataset.reader.url(layer.file)}: sha256 {stored}, layer.json has {layer.info.masks.sha256}; "
            "restore it from a copy"
        )
    dataset.layers = tuple(parents)
    with bar(len(ids), "verify", " images", quiet) as shown:
        for image_id in ids:
            shown.update(1)
            try:
                (base,) = dataset.masks([dataset.row(image_id)])
            except KeyError:
                found.problems.append(
                    f"{LAYERS}/{name}: image {image_id} is not in {root}; make the layer again"
                )
                continue
            except Sa1bError as error:
                found.problems.append(str(error))
                continue
            try:
                pending = layer.submit(dataset.reader, image_id)
                assert pending is not None
                pending.apply(base).runs()
                found.images += 1
            except (Sa1bError, MaskError) as error:
                found.problems.append(str(error))
    return found
