"""What quarantine has of an archive in which no pair is complete: its members and damage."""

import ast
from collections import namedtuple

BLOCK = 512
MAX_MEMBER_BYTES = MAX_KEPT_BYTES = 32 << 20
Member = namedtuple("Member", "name kind offset data target", defaults=("",))
Damage = namedtuple("Damage", "reason message offset length data", defaults=(0, b""))


def item(line, quarantine):
    """The member or damage of a line of refused.jsonl."""
    data = (quarantine / line["file"]).read_bytes() if line["file"] else b""
    assert len(data) == line.get("kept_bytes", line["bytes"])
    if line["name"] is None:
        return Damage(line["reason"], line["message"], line["offset"], line["bytes"], data)
    if line["reason"] != "not_a_file":
        return Member(line["name"], "file", line["offset"], data)
    kind, _, target = line["message"].partition(" to ")
    if kind == "hard link":
        return Member(
            line["name"], kind, line["offset"], data, ast.literal_eval(target.rpartition(", which")[0])
        )
    return Member(line["name"], line["message"].partition(";")[0], line["offset"], data)
