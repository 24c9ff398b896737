"""The targets of links within README.md and docs/*.md exist: files, and headings for anchors."""

import re
import unicodedata
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import PAGES, REPOSITORY, without_blocks

PROJECT = "https://github.com/sa1b/sa1b"
_LINK = re.compile(
    r"\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^)\s]+)[^)]*\)|(?:href|src)=\"(?P<html>[^\"]+)\""
)
_HEADING = re.compile(r"^#{1,6} +(.+?)(?: *\{ *#(?P<id>[\w-]+) *\})? *#*$", re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """The anchors of the headings of a page, which GitHub and mkdocs form in the same way."""
    found = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for match in _HEADING.finditer(without_blocks(text)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", lambda link: link[1] or "", match[1]).strip().lower()
        on_github = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        ascii_only = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        on_site = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip())
        found |= {match["id"]} if match["id"] else {on_github} & {on_site}
    return found


def broken(page: Path, text: str) -> list[str]:
    """The broken links of a page, each with the reason."""
    found = []
    for match in _LINK.finditer(re.sub(r"`[^`\n]*`", "", without_blocks(text))):
        target = match["target"] or match["html"]
        path, _, anchor = target.partition("#")
        if target.startswith(f"{PROJECT}/blob/") or target.startswith(f"{PROJECT}/tree/"):
            if not (REPOSITORY / path.split("/", 7)[7]).exists():
                found.append(f"{target}: no such file in the repository")
            continue
        if re.match(r"[a-z]+:", target):
            continue
        goal = (page.parent / path).resolve() if path else page
        if goal != page and not goal.exists():
            found.append(f"{target}: no such file")
        elif page.parent.name == "docs" and not goal.is_relative_to(page.parent):
            found.append(f"{target}: outside docs/; write {PROJECT}/blob/main/...")
        elif anchor and anchor not in anchors_of(text if goal == page else goal.read_text(encoding="utf-8")):
            found.append(f"{target}: no heading with this anchor on GitHub and on the site")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("[x](nowhere.md)", "no such file"),
        ("[x](#nowhere)", "no heading"),
        ("[x](../README.md)", "outside docs/"),
        (f"[x]({PROJECT}/blob/main/nowhere.py)", "no such file in the repository"),
        ('<img src="nowhere.png">', "no such file"),
        ("[`x` and [y]](nowhere.md)", "no such file"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(link: str, reason: str) -> None:
    (found,) = broken(REPOSITORY / "docs" / "page.md", f"# Title\n{link}\n")
    assert reason in found


def test_headings_are_anchors_code_blocks_and_other_hosts_are_not_looked_at() -> None:
    text = (
        "# How an *epoch* works, in `Stream`\n```bash\n# comment\n```\n[x](#how-an-epoch-works-in-stream) "
        f"`[x](nowhere)` [x](https://example.com/#a) [x]({PROJECT}/blob/main/README.md)\n"
    )
    assert broken(REPOSITORY / "docs" / "page.md", text) == []
    assert "comment" not in anchors_of(text)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    groups = [pages for group in site["nav"] for pages in group.values()]
    listed = [path for pages in groups for page in pages for path in page.values()]
    assert sorted(listed) == sorted(page.name for page in PAGES if page.parent.name == "docs")


def test_every_guarantee_names_a_command_that_tests_it() -> None:
    text = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    tables = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [line for line in tables if not line.startswith("| guarantee |")]
    assert len(rows) > 50
    for row in rows:
        command = re.search(r" \| (`[^|]+`) \|$", row)
        assert command is not None, row
        paths = re.findall(r"tests/[\w/.]+", command[1])
        programs = re.findall(r"python -m ([\w.]+)", command[1])
        paths += [f"{one.replace('.', '/')}.py" for one in programs]
        assert paths
        for path in paths:
            assert (REPOSITORY / path).exists(), f"{path}: in {row}"
