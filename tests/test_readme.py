"""The README is short, and names every command; the format's page names every column of the index."""

import re
from pathlib import Path

import pyarrow.parquet as pq

from sa1b.verbs import in_order
from tests.shards import tiny

VERBS = [verb for verb in in_order() if " " not in verb]

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_readme_is_short_and_lists_its_contents_on_the_first_screen() -> None:
    assert len(README.splitlines()) <= 130
    first_screen = README.split("![")[0]
    assert len(first_screen.splitlines()) <= 15
    for title in re.findall(r"^## (.+)$", README, re.MULTILINE):
        if title != "License":
            assert f"](#{title.lower().replace(' ', '-')})" in first_screen, title


def test_every_command_is_named() -> None:
    assert {verb for verb in VERBS if f"`{verb}`" not in README and f"`sa1b {verb}`" not in README} == set()


def test_the_image_is_small() -> None:
    (path,) = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert (REPOSITORY / path).stat().st_size < 300_000


def test_every_index_column_is_documented(tmp_path: Path) -> None:
    tiny.make_tar(tmp_path / "sa_000020.tar", range(223750, 223753))
    tiny.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "shards")
    columns = set(pq.read_schema(next((tmp_path / "shards").glob("*.parquet"))).names)
    page = (REPOSITORY / "docs" / "dataset-format.md").read_text(encoding="utf-8")
    table = page[page.index("| column | type | meaning |") :].split("\n\n")[0]
    documented = {
        name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert documented == columns
