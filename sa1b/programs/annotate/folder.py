"""The output of an annotation: folders of pairs, the settings and the list of images.

    OUT/annotate.json             weights and settings, which are the same for every run on this folder
    OUT/annotate.jsonl            a line for each annotated image: its id, its file and its number of masks
    OUT/<name>-0000/sa_5.jpg      pairs, in folders of about 10,000 images, each a source of `sa1b reshard`
    OUT/<name>-0000/sa_5.json     written after the image, atomically: with it the image is complete

For a layer, there are no images, and annotate.jsonl also lists those that were refused.

Several processes may write to one folder, on one or several machines: no file depends on another process, and
two processes that write the same file write the same bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sa1b.errors import BadSample, UsageError
from sa1b.names import is_source_name, member_name, parse_member_name
from sa1b.storage.atomic import (
    append,
    append_line,
    is_of_dead_process,
    json_bytes,
    process_of_temporary,
    temporary_path,
    write_whole,
)
from sa1b.storage.open import open_store

SETTINGS, LINES = "annotate.json", "annotate.jsonl"
FORMAT = "sa1b-annotate-1"
_INFORMATION = ("folders", "name", "weights")  # may differ between runs: the digest identifies weights
IMAGES_PER_FOLDER = 10_000  # about as many as in a tar of SA-1B


@dataclass(slots=True)
class AnnotationFolder:
    """The output folder of an annotation."""

    out: Path
    folders: int  # number of folders of pairs
    name: str  # start of their names: that of the output folder in the first run
    image_ids: str  # origin of the ids, see `annotate`
    with_images: bool = True
    complete: set[int] = field(default_factory=set)  # ids of images with an annotation file
    # names by id of the images that have a line in annotate.jsonl
    listed: dict[int, set[str]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)  # ids of images that cannot be annotated

    def path(self, image_id: int, ending: str) -> Path:
        folder = f"{self.name}-{image_id % self.folders:04d}"
        return self.out / folder / member_name(image_id, ending)

    def other_ids(self) -> str:
        """The remedy for an image with the id of another one."""
        other = "annotate these images into another folder"
        return other if self.image_ids == "content" else f"pass --image-ids content, or {other}"

    def is_complete(self, image_id: int, jpeg: bytes) -> bool:
        """Whether this image is annotated; BadSample if another image has this id."""
        if image_id not in self.complete:
            return False
        path = self.path(image_id, "jpg")
        if not path.exists():
            return False
        if path.read_bytes() == jpeg:
            return True
        if self.image_ids == "content":  # equal ids mean equal images
            raise BadSample(
                "id_taken",
                f"{path} has other bytes than this image; repeat the --quality of the first run, or, if the "
                "file is damaged, remove it and run the same command again",
            )
        raise BadSample("id_taken", f"{path} is another image with this id; {self.other_ids()}")

    def write(self, image_id: int, jpeg: bytes, document: bytes) -> None:
        """Write a pair, the annotation file last; OSError names the file."""
        for ending, data in (("jpg", jpeg), ("json", document))[not self.with_images :]:
            path = self.path(image_id, ending)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, data, temporary_path(path))

    def list_image(self, image_id: int, name: str, masks: int | None) -> None:
        """Add a line for a complete image, unless it has one."""
        names = self.listed.setdefault(image_id, set())
        if name not in names:
            names.add(name)
            line: dict[str, Any] = {"image_id": image_id, "file": name}
            append_line(self.out / LINES, json.dumps(line if masks is None else line | {"masks": masks}))

    def refuse(self, image_id: int, name: str, reason: str) -> None:
        """Add a line for an image that cannot be annotated, unless it has one."""
        if image_id not in self.refused:
            self.refused.add(image_id)
            line = {"image_id": image_id, "file": name, "refused": reason}
            append_line(self.out / LINES, json.dumps(line))

    def scan(self) -> None:
        """Read which images are complete, listed and refused; remove temporary files of killed processes."""
        for path in (child for part in self.out.iterdir() if part.is_dir() for child in part.iterdir()):
            named = parse_member_name(path.name)
            if named is not None and named.ending == "json":
                self.complete.add(named.image_id)
            elif is_of_dead_process(process_of_temporary(path) or ""):
                path.unlink(missing_ok=True)
        try:
            line = b"\n"
            with (self.out / LINES).open("rb") as file:
                for line in file:
                    try:
                        listed = json.loads(line)
                        image_id, name = int(listed["image_id"]), str(listed["file"])
                        if "refused" in listed:
                            self.refused.add(image_id)
                        else:
                            self.listed.setdefault(image_id, set()).add(name)
                    except (ValueError, KeyError, TypeError):
                        continue  # a line truncated by a crash of the machine; the image gets a new line
            if not line.endswith(b"\n"):
                append(self.out / LINES, b"\n")
        except FileNotFoundError:
            pass


def open_folder(
    out: Path, settings: Mapping[str, Any], images: int, *, with_images: bool = True
) -> AnnotationFolder:
    """Create the folder, or open that of an earlier run with the same settings, which change the annotations.

    Temporary files of killed processes are removed. The number of folders follows from the number of images.
    UsageError: it has other content, or other settings.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder")
    name = out.resolve().name
    expected = {
        "format": FORMAT,
        "folders": max(1, -(-images // IMAGES_PER_FOLDER)),
        "name": name if is_source_name(name) else "annotated",
        **settings,
    }
    path = out / SETTINGS
    if not path.exists():
        in_use = out.exists() and any(child.name[0] != "." for child in out.iterdir())
        if in_use and not path.exists():  # another process may have started meanwhile
            raise UsageError(f"--out {out}: is not empty, and has no {SETTINGS}; name another folder")
        open_store(out).put_if_absent(SETTINGS, json_bytes(expected))  # one of several processes writes it
    try:
        stored = json.loads(path.read_bytes())
        folders, name = int(stored["folders"]), str(stored["name"])
        if folders < 1 or not is_source_name(name):
            raise ValueError(f"folders {folders}, name {name!r}")
        differing = [
            name for name in expected if name not in _INFORMATION and stored.get(name) != expected[name]
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}: damaged ({error!r}); annotate into another folder") from None
    if differing:
        changes = ", ".join(f"{name} {stored.get(name)}, now {expected[name]}" for name in differing)
        raise UsageError(
            f"--out {out}: has annotations with other settings ({changes}); repeat the settings of "
            f"{path}, or name another folder"
        )
    folder = AnnotationFolder(out, folders, name, str(settings["image_ids"]), with_images)
    folder.scan()
    return folder
