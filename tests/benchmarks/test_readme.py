"""The figures of README.md and docs/benchmarks.md equal those of the named results files."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import curves, parts, readme, report, tables
from benchmarks.readme import PAGES, REPOSITORY, headline, rewritten

# Results in the form of the benchmarks, with round numbers.
PARTS: dict[str, dict[str, Any]] = {
    "reshard": {
        "bytes_per_second, wall": 2e8,
        "gzip_bytes_per_second, wall": 4e8,
        "bytes_per_second, processor": 1e8,
        "gzip_bytes_per_second, processor": 4e8,
    },
    "64 masks to 1024x1024": {"test_raster_1024[frame]": {"seconds": 0.00125, "times_faster": 150.0}},
    "order": {"a position, block size 1, ns": 54.2, "a position, block size 8, ns": 25.0, "other": 1.0},
    "demo": {"seconds": 135.4},
}


@pytest.mark.parametrize("page", [page for page in PAGES if page.exists()], ids=lambda page: page.stem)
def test_the_figures_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert rewritten(text) == text
    assert "<!-- figures: " in text


@pytest.mark.parametrize("path", sorted((REPOSITORY / "benchmarks" / "results").glob("*-cores.json")))
def test_the_results_that_are_kept_can_be_shown(path: Path) -> None:
    document = json.loads(path.read_text())
    assert "VERDICT" in "\n".join(tables.all_tables(document))
    assert "<svg" in report.page(document)
    assert len(headline(document)) == 7


def test_recorded_parts_become_rows(tmp_path: Path) -> None:
    path = parts.record(tmp_path, {name: PARTS[name] for name in ("reshard", "demo")})
    assert parts.record(tmp_path, {name: PARTS[name] for name in PARTS if name != "reshard"}) == path
    document = json.loads(path.read_text())
    assert document["parts"]["reshard"]["figures"] == PARTS["reshard"]
    assert set(document["parts"]["order"]) == {"date", "load", "versions", "figures"}
    head, _, *table = parts.lines(document)
    assert document["machine"]["processor"] in head
    assert table[2:] == [
        "| source tar to verified shards, two cores | 200 MB/s | `gzip -dc` of the same tar: 400 MB/s; ratio "
        "0.50 by elapsed time, 0.25 by processor time | `pytest benchmarks/test_reshard.py` |",
        "| 64 masks to 1024 x 1024 pixels | 1.25 ms | pycocotools and OpenCV: 150 times as long | "
        "`pytest benchmarks/test_masks.py` |",
        "| a position of the order, 11.2 million samples | 25 to 54 ns |  | `pytest benchmarks/test_order.py` |",
        "| `make demo` after the installation, training included | 135 s |  | `make demo` |",
    ]


def test_blocks_are_filled_from_the_files_they_name_or_from_those_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(next((REPOSITORY / "benchmarks" / "results").glob("*-cores.json")).read_text())
    document["tools"] = {"reshard": {"bytes_per_second": 2e8}, "gzip -dc": {"bytes_per_second": 4e8}}
    monkeypatch.setattr(readme, "REPOSITORY", tmp_path)
    (tmp_path / "new.json").write_text(json.dumps(document))
    (tmp_path / "new-parts.json").write_text(
        json.dumps(
            {"machine": document["machine"], "parts": {"demo": {"date": "today", "figures": {"seconds": 1}}}}
        )
    )
    end = "<!-- end of figures -->"
    text = "\n".join(
        f"before\n<!-- figures: {name} -->\nold\n{end}"
        for name in ("old.json headline", "old.json", "old-parts.json")
    )
    assert rewritten(text) == text  # a file that does not exist yet
    filled = rewritten(text, "new")
    assert "old" not in filled
    assert filled.count("before\n<!-- figures: new") == 3
    assert "| 200 MB/s | `gzip -dc` alone: 400 MB/s |" in filled
    assert "training included | 1 s |" in filled
    assert rewritten(filled) == filled


@pytest.mark.parametrize("name", curves.IMAGES)
def test_the_curves_of_the_documentation_are_those_of_the_results(name: str) -> None:
    (figures,) = (
        found["parts"][name]["figures"]
        for path in sorted(parts.RESULTS.glob("*-parts.json"))
        if name in (found := json.loads(path.read_text()))["parts"]
    )
    drawn = curves.IMAGES[name](figures)
    assert (curves.OUT / f"{name.replace(' ', '-')}.svg").read_text() == drawn
    image = ElementTree.fromstring(drawn)
    lines = [path for path in image.iter() if path.get("class", "").startswith("line")]
    assert len(lines) == 6 + len({line.get("class") for line in lines})  # and the key
