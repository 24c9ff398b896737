"""Shared code of verify's tests: a check in this process, and ways to damage files."""

import json
import re
import shlex
from types import SimpleNamespace

from sa1b.verify.verify import verify
from tests import kit


def check(root, *, workers=1, quiet=True, **options):
    """What `sa1b verify --json` says; always with one worker."""
    flags = kit.flags(options)
    done = kit.run("verify", root, "--workers", 1, "--json", *flags, code=None)
    report = SimpleNamespace(**done.json)
    report.findings = [SimpleNamespace(**one) for one in report.findings]
    report.exit_code = lambda: done.code
    report.document = lambda: done.json
    report.table = lambda: kit.run("verify", root, "--workers", 1, *flags, code=None).out
    return report


def check_here(root, **options):
    """In this process, for tests that patch it."""
    return verify(root, workers=0, quiet=True, **options)


def commands_in(advice):
    """The words of each command in an advice, without the program; it is safe to paste."""
    found = re.findall("`([^`]+)`", advice)
    assert not any(re.search(r"[<>|&;]|\brm\b", re.sub("'[^']*'", "", one)) for one in found)
    return [shlex.split(re.sub(r"^.*?\bsa1b ", "", one, count=1)) for one in found]


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
