"""Keep masks beside the shards of a dataset directory: another model's, corrections, a further round.

Example: sa1b layer add shards round2.json --name round2
         sa1b layer add shards corrected --name corrected --existing replace --on round2
         sa1b layer list shards
         sa1b layer verify shards round2
         sa1b layer drop shards round2

A layer is a folder in ROOT/layers; shards never change. Training with it: --data.layers round2. Exit code 0:
done; 1: verify found damage; 2: nothing was done; 3: added, and an image or a mask of the files is not in the
layer; 130: interrupted.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from sa1b.console import command, counted, loading
from sa1b.errors import ManifestError, UsageError
from sa1b.report import aligned, present
from sa1b.sources.path_arguments import check_writable, takes_endpoint

if TYPE_CHECKING:
    from sa1b.shards.documents import LayerInfo

TOUR = (60, "Data", "masks beside the shards", "sa1b layer add shards masks.json --name round2")


@takes_endpoint
def main(
    action: Annotated[
        Positional[Literal["add", "list", "drop", "verify"]], tyro.conf.arg(metavar="add|list|drop|verify")
    ],
    root: Annotated[Positional[str], tyro.conf.arg(metavar="ROOT")],
    files: Annotated[
        Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE|NAME...", help_behavior_hint="")
    ] = (),
    /,
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    existing: Literal["keep", "replace", "hide"] = "keep",
    image_ids: Literal["keep", "name", "hash"] = "keep",
    on: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None,
    overwrite: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Keep masks beside the shards of a dataset directory: another model's, corrections, a further round.

    Args:
        action: add: make a layer from files. list: print the layers. drop: remove layers. verify: read
            layers completely and compare them with the shards.
        root: Dataset directory that `sa1b reshard` made: a folder or a URL.
        files: For add: annotation files of SA-1B (sa_5.json, folders or tars of them, also those of
            `sa1b annotate`), files in COCO's format (.json), or lists of results in COCO's format (.json).
            Images are not needed. For drop and verify: names of layers.
        name: For add: name of the new layer.
        existing: For add: what happens to the masks that an image of the files has. keep: all of them stay.
            replace: a mask of the files replaces the one with its id. hide: likewise, and the other masks of
            the image are hidden: the files have all masks of their images.
        image_ids: For add: where the ids of images in COCO's format come from. keep: the ids of the file.
            name: the number in sa_<id>.jpg. hash: as `sa1b reshard --image-ids hash`, for a file of the same
            name.
        on: For add: name of the layer that the new one builds on. Who reads the new one reads both.
        overwrite: For add: replace the layer of this name.
        json_output: Print the result as JSON, without progress.
    """
    if action == "add" and name is None:
        raise UsageError("--name: missing; choose a name for the layer")
    if action == "add" and not files:
        raise UsageError(f"--name {name}: no FILE; name files of masks")
    changed = name or on or overwrite or (existing, image_ids) != ("keep", "keep")
    if action != "add" and changed:
        raise UsageError(f"{action}: takes no flag but --json and --endpoint; omit the others")
    if action in ("drop", "verify") and not files:
        raise UsageError(f"{action}: no NAME; pass names that `{command('layer', 'list', root)}` prints")
    if action == "list" and files:
        raise UsageError(f"{files[0]}: list takes no names; omit it")
    if action in ("add", "drop"):
        check_writable(f"layer {action} changes {root}", root)
    with loading():
        from sa1b.programs.layer.add import add_layer
        from sa1b.shards.layer_writer import drop
        from sa1b.storage.open import open_store
        from sa1b.verify.layer_check import LayerCheck, verify_layer
    if action == "list":
        present(list_layers(root), json_output)
        return 0
    if action == "verify":
        checks: list[LayerCheck] = []
        for layer in files:
            checks.append(verify_layer(root, layer, quiet=json_output))
            present(checks[-1], json_output)
        return max(check.exit_code() for check in checks)
    if action == "drop":
        for layer in files:
            drop(open_store(root), layer)
            document = json.dumps({"dropped": layer, "exit_code": 0})
            print(document if json_output else f"Dropped: {layer}", flush=True)
        return 0
    assert name is not None
    summary = add_layer(
        root,
        tuple(map(Path, files)),
        name,
        existing=existing,
        image_ids=image_ids,
        on=on,
        overwrite=overwrite,
        quiet=json_output,
    )
    present(summary, json_output)
    return summary.exit_code()


@dataclass(slots=True)
class LayerList:
    """The layers of a dataset directory."""

    root: str
    layers: "list[LayerInfo]" = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)  # name -> message
    # of layers that `sa1b annotate` has not completed: name -> number of images, and the command that resumes
    annotated: dict[str, dict[str, Any]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The list as a JSON document."""
        layers = [
            {
                **layer.figures(),
                "bytes": layer.masks.bytes + layer.index.bytes,
                "parent": None if layer.parent is None else layer.parent.name,
                "provenance": layer.provenance,
            }
            for layer in self.layers
        ]
        others = {"unfinished": self.unfinished, "damaged": self.damaged, "annotated": self.annotated}
        return {"layers": layers, **others}

    def table(self) -> str:
        """The list as text."""
        head = ("name", "digest", "images", "added", "replaced", "hidden", "on", "made")
        rows: list[tuple[str, ...]] = [head] if self.layers else []
        for layer in self.layers:
            numbers = (f"{n:,}" for n in (layer.images, layer.added, layer.replaced, layer.hidden))
            above = "-" if layer.parent is None else layer.parent.name
            date = str(layer.provenance.get("date", "-"))
            rows.append((layer.name, layer.digest[:12], *numbers, above, date))
        lines = aligned(rows, right=(False, False, True, True, True, True, False, False))
        lines += [
            f"unfinished {name}: its command was stopped; run that command again, or remove the layer with "
            f"`{command('layer', 'drop', self.root, name)}`"
            for name in self.unfinished
        ]
        lines += [f"damaged {message}" for message in self.damaged.values()]
        lines += [
            f"annotating {name}: {counted(record['images'], 'image')} so far; `{record['command']}` resumes "
            f"it, `{command('layer', 'drop', self.root, name)}` removes them"
            for name, record in self.annotated.items()
        ]
        return "\n".join(lines) or f"{self.root}: no layers"


def list_layers(root: str) -> LayerList:
    """The layers of a dataset directory, complete or not."""
    with loading():
        from sa1b.shards.dataset import Dataset
        from sa1b.shards.layer import layer_names, read_info
        from sa1b.shards.layer_writer import annotated
        from sa1b.storage.open import open_store
    store = open_store(Dataset(root).root)
    listing = LayerList(root)
    for name, record in annotated(store).items():
        again = record.get("command", f"{command('annotate', '--shards', root, '--name', name)}")
        listing.annotated[name] = {"images": record["images"], "command": again}
    for name, is_complete in layer_names(store).items():
        try:
            if is_complete:
                listing.layers.append(read_info(store.reader, name))
            else:
                listing.unfinished.append(name)
        except ManifestError as error:
            listing.damaged[name] = str(error)
    return listing
