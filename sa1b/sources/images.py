"""Images without annotations as pairs: each image with an annotation file that has no masks.

    photos/cats/1.jpg, photos/dogs/1.png        a folder with images at any depth is one source
    train-000000.tar                            the images of a tar with any names, such as one of webdataset

The id of sa_<id>.jpg is the number in its name. Any other image has 53 bits of the SHA-256 of
`<source>/<name in the source>`, so that the same source with the same name always gives the same ids. JPEGs
keep their bytes; PNG, WebP, BMP and TIFF become JPEGs. Other files of a source are left out.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sa1b.errors import BadSample
from sa1b.names import member_name, parse_member_path
from sa1b.sources.coco import as_jpeg
from sa1b.sources.coco_file import hashed_id
from sa1b.sources.folder import FolderFormat, below, is_folder, is_pair_name
from sa1b.sources.source import Ignore, Progress, Source, SourceReading
from sa1b.sources.tar_reader import TarFormat
from sa1b.sources.tar_stream import Damage, Member

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_COMPANIONS = (".json", ".txt")  # texts and annotations beside images are left out without a note


def is_image_name(name: str) -> bool:
    """Whether a file of this name is taken as an image."""
    return name.lower().endswith(ENDINGS) and not name.rpartition("/")[2].startswith(".")


class _ImagesPass(SourceReading):
    """The pass of another format, with a pair in place of each image."""

    def __init__(self, found: SourceReading, source: str, max_pixels: int) -> None:
        self._found, self._source, self._max_pixels = found, source, max_pixels
        self.categories = []

    def items(self) -> Iterator[Member | Damage]:
        """The jpg and the json of each image; damage, and what is no file, as in the source."""
        for item in self._found.items():
            if isinstance(item, Damage) or item.reason or item.kind != "file":
                yield item
            elif is_image_name(item.name):
                yield from self._pair(item)

    def digests(self) -> dict[str, str]:
        return self._found.digests()

    def check_unchanged(self) -> None:
        return self._found.check_unchanged()

    def close(self) -> None:
        return self._found.close()

    def _pair(self, image: Member) -> Iterator[Member]:
        name = image.name.removeprefix("./")
        named = parse_member_path(f"{name.rpartition('.')[0]}.jpg")
        image_id = hashed_id(self._source, name) if named is None else named.image_id
        try:
            jpeg, height, width, encoding = as_jpeg(image.data, name, (None, None), self._max_pixels)
        except BadSample as error:
            yield replace(image, detail=str(error), reason=error.reason)
            return
        document = {
            "image": {
                "image_id": image_id,
                "width": width,
                "height": height,
                "file_name": member_name(image_id, "jpg"),
            },
            "annotations": [],
            "provenance": {"format": "images", "file": name, **encoding},
        }
        yield replace(image, name=member_name(image_id, "jpg"), data=jpeg)
        yield replace(image, name=member_name(image_id, "json"), data=json.dumps(document).encode())


@dataclass(frozen=True)
class ImageFolder(FolderFormat):
    """Folders of images, with all their subfolders."""

    max_pixels: int

    def files(self, path: Path, ignore: Ignore) -> list[Path]:
        found = []
        for folder in [path, *self.parts(path, ignore)]:
            try:
                names = [entry.name for entry in os.scandir(folder) if not is_folder(entry)]
            except OSError:
                if folder == path:
                    raise
                found.append(folder)  # refused as a member
            else:
                found += [folder / name for name in names if is_image_name(name)]
        return sorted(file for file in found if not ignore(file))

    def parts(self, path: Path, ignore: Ignore) -> list[Path]:
        return below(path, [path], ignore)

    def is_member(self, name: str) -> bool:
        return is_image_name(name) or name.lower().endswith(_COMPANIONS) or is_pair_name(name)

    def member_name(self, path: Path, file: Path) -> str:
        return file.relative_to(path).as_posix()

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        return _ImagesPass(super().open(source, md5=md5, progress=progress), source.name, self.max_pixels)

    def reading(self, source: Source) -> dict[str, Any]:
        return {**super().reading(source), "images_only": True}


@dataclass(frozen=True)
class ImageTar(TarFormat):
    """Tars that contain images."""

    max_pixels: int

    def open(self, source: Source, *, md5: bool, progress: Progress | None) -> SourceReading:
        return _ImagesPass(super().open(source, md5=md5, progress=progress), source.name, self.max_pixels)

    def reading(self, source: Source) -> dict[str, Any]:
        return {"images_only": True}
