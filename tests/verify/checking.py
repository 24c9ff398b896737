"""Shared code of verify's tests: a check in this process, and ways to damage files."""

import json

from sa1b.shards.documents import SEAL, seal_of
from sa1b.verify.verify import verify


def check(root, **options):
    """In this process: faster, and what a process of its own runs too."""
    return verify(root, workers=0, quiet=True, **options)


def kinds(report):
    return {finding.kind for finding in report.findings}


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def content(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def edit_json(path, change):
    """Write a JSON file again as it is written, with `change(document)` applied."""
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document, indent=1) + "\n")


def edit_view(path, change):
    """Like `edit_json`, and the document gets the digest of its new content."""

    def changed(document):
        change(document)
        document.pop(SEAL, None)
        document[SEAL] = seal_of(document)

    edit_json(path, changed)
