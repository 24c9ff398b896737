"""The check of layers: digests, and every record with the stored masks that it changes."""

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from sa1b.console import command, counted
from sa1b.errors import ManifestError, Sa1bError
from sa1b.masks.runs import MaskError
from sa1b.report import bar, first_lines
from sa1b.shards.annotation import Annotations
from sa1b.shards.dataset import Dataset
from sa1b.shards.layer import INDEX, is_own, layer_names, open_layers
from sa1b.shards.manifest import LAYERS
from sa1b.shards.sample import location_of, submit
from sa1b.storage.cache import digest
from sa1b.storage.errors import MissingError, StorageError
from sa1b.storage.store import Store
from sa1b.verify.report import Problem, VerifyReport, short

_BATCH = 64  # images whose masks are read together


@dataclass(slots=True)
class LayerCheck:
    """The result of the verification of a layer."""

    name: str
    images: int = 0
    absent: int = 0  # images that the dataset directory lacks, as after --drop or a copy of some shards
    problems: list[str] = field(default_factory=list)

    def exit_code(self) -> int:
        """0: intact; 1: there is a problem."""
        return 1 if self.problems else 0

    def document(self) -> dict[str, Any]:
        """The result as a JSON document."""
        return {"exit_code": self.exit_code(), **asdict(self)}

    def table(self) -> str:
        """The result as text."""
        if self.problems:
            lines = first_lines(self.problems)
            return "\n".join([*lines, f"layer {self.name}: {counted(len(self.problems), 'problem')}"])
        absent = f", {self.absent:,} not in the directory" if self.absent else ""
        return f"layer {self.name}: {counted(self.images, 'image')} verified{absent}, intact"


def verify_layer(root: str | Dataset, name: str, *, records: bool = True, quiet: bool = False) -> LayerCheck:
    """Verify the digests of a layer and, with `records`, apply every record to the stored masks of its image.

    StorageError: the store cannot be read. TableError: the sample table is damaged.
    """
    check = LayerCheck(name)
    dataset = Dataset(root.root if isinstance(root, Dataset) else root)
    dataset.check_table()
    try:
        *parents, layer = open_layers(dataset.reader, dataset.table, [name])
        listed = {layer.file: layer.info.masks, f"{LAYERS}/{name}/{INDEX}": layer.info.index}
        stored = {file: digest(dataset.reader, file) for file in listed}  # a cache may have the index still
    except (ManifestError, MissingError, FileNotFoundError) as error:
        check.problems.append(str(error))
        return check
    check.problems += [
        f"{dataset.reader.url(file)}: sha256 {stored[file]}, layer.json has {one.sha256}; "
        "restore it from a copy"
        for file, one in listed.items()
        if stored[file] != one.sha256
    ]
    of_layer = layer.columns["image_id"]
    ids = of_layer[np.isin(of_layer, dataset.table.image_id.astype(np.int64))].tolist()
    check.absent = len(of_layer) - len(ids)
    if not records:
        check.images = len(ids)
        return check
    dataset.layers = tuple(parents)
    with bar(len(ids), "verify", " images", quiet) as shown:
        for block in (ids[i : i + _BATCH] for i in range(0, len(ids), _BATCH)):
            changes = [layer.submit(dataset.reader, image_id) for image_id in block]
            for pending, base in zip(changes, _masks(dataset, block), strict=True):
                assert pending is not None
                try:
                    if isinstance(base, Sa1bError):
                        raise base
                    pending.apply(base).runs()
                    check.images += 1
                except StorageError:
                    raise
                except (Sa1bError, MaskError) as error:
                    check.problems.append(str(error))
            shown.update(len(block))
    return check


def _masks(dataset: Dataset, ids: list[int]) -> Iterator[Annotations | Sa1bError]:
    """The stored masks of images, read together; for a damaged image, the error."""
    locations = [location_of(dataset.table, dataset.row(image_id), dataset.shards) for image_id in ids]
    reads = [submit(dataset.reader, [location.without_image()], dataset.layers)[0] for location in locations]
    for read in reads:
        try:
            yield read.result()[1]
        except StorageError:
            raise
        except Sa1bError as error:
            yield error


def check_layers(store: Store, report: VerifyReport, *, deep: bool, quiet: bool) -> None:
    """Check all layers of a dataset directory: findings and notes go into the report."""
    names = layer_names(store)
    if not names:
        return
    try:
        dataset = Dataset(store.root)
        dataset.check_table()
    except Sa1bError as error:
        report.unchecked[LAYERS] = short(error)
        return
    for name, is_complete in names.items():
        if not is_complete:
            report.notes.append(f"layer {name} is unfinished: the same command makes it again")
            continue
        try:
            check = verify_layer(dataset, name, records=deep, quiet=quiet)
        except StorageError as error:
            report.unchecked[f"{LAYERS}/{name}"] = short(error)
            continue
        report.layers += 1
        for message in check.problems:
            again = command("layer", "add", store.root, "PATH/TO/MASKS", "--name", name, "--overwrite")
            remedy = f"restore {LAYERS}/{name} from a copy, or make the layer again, such as with `{again}`"
            if not is_own(store, name):  # no command replaces files that may be a user's
                folder = shlex.quote(store.url(f"{LAYERS}/{name}"))
                remedy = f"move {folder} to another folder, and make the layer again"
            report.found.add(Problem("layer_damaged", f"{LAYERS}/{name}", message, remedy))
        if check.absent:
            report.notes.append(f"layer {name} has {counted(check.absent, 'image')} that the directory lacks")
