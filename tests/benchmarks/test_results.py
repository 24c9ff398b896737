"""Output from the results of a run: verdict, tables, page, README block."""

import re
from xml.etree import ElementTree

import pytest

from benchmarks import own_time, readme, report, tables
from benchmarks.peers.measured import Row, best, ratio
from tests.benchmarks.results import document


def rounds(*seconds: float) -> list[dict[str, float]]:
    return [{"images": 2, "seconds": 2 * each, "cpu": each} for each in seconds]


def test_a_ratio_compares_round_by_round() -> None:
    slow, fast = Row("a", "peer", 0), Row("b", "ours", 0)
    slow.rounds, fast.rounds = rounds(10, 40, 20), rounds(1, 2, 1)
    assert ratio(slow, fast) == {"median": 20.0, "least": 10.0, "most": 20.0}


def test_the_best_of_a_kind_is_the_quickest_by_its_median() -> None:
    rows = [Row("a", "peer", 0), Row("b", "peer", 2), Row("c", "limit", 0)]
    for each, seconds in zip(rows, ((1, 9, 9), (8, 8, 2), (1, 1, 1)), strict=True):
        each.rounds = rounds(*seconds)
    assert best(rows, "peer").name == "b"


@pytest.mark.parametrize(
    ("change", "limit", "words"),
    [
        ({}, "JPEG decoding", "--image-size 1024"),
        ({"storage": {"disk": 1e7, "page cache": 1e10}}, "storage", "Faster storage"),
        ({"gpu": {"copy": 30.0}}, "copy", "More cores"),
    ],
)
def test_the_verdict_names_the_slowest_part(change: dict[str, object], limit: str, words: str) -> None:
    found = own_time.verdict(document() | change)
    assert found["limit"] == limit
    assert words in found["change"]
    assert found["images_per_second"]["processor"] == pytest.approx(2 * 1000 / 10)


def test_the_verdict_predicts_what_smaller_jpegs_give() -> None:
    assert "2.5 times" in own_time.verdict(document())["change"]


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    made = document()
    page = report.page(made | {"verdict": own_time.verdict(made)})
    assert "<!--" not in page
    # Within an SVG, "#..." is a part of the page, and www.w3.org is in the names of its formats.
    assert not re.findall(r'(?:src|href)="(?!#)|url\((?!#)|https?://(?!www\.w3\.org/)', page)
    assert "A &lt;processor&gt;" in page
    assert "A <processor>" not in page
    body = page[page.index("<body>") : page.index("</body>") + len("</body>")]
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(body).iter()}
    assert {"svg", "dl", "pre", "section"} <= tags


def test_what_was_not_run_is_said() -> None:
    made = document()
    made["verdict"] = own_time.verdict(made)
    text = "\n".join(tables.all_tables(made))
    assert "On a GPU: not run" in text
    assert "litData: not run: litdata not installed" in text
    assert "(a small server; not run: Ceph)" in text
    assert "VERDICT: " in text


def test_what_a_gpu_did_is_shown_row_by_row() -> None:
    times = {"raster_milliseconds": 0.3, "zero_milliseconds": 0.25, "copy": 9e3, "batches": 70.0}
    found = times | {"model": 55.0, "data_wait": 0.004}
    text = tables.device(found, "A GPU")
    for words in ("A GPU", "0.30 ms", "0.25 ms", "9000 images/s", "70 batches/s", "55.0 images/s", "0.4%"):
        assert words in text
    verdict = own_time.verdict(
        document() | {"gpu": found, "machine": document()["machine"] | {"gpu": "A GPU"}}
    )
    assert verdict["limit"] == "model"
    assert verdict["not_run"] == []


def test_smaller_jpegs_are_not_advised_to_who_has_them() -> None:
    made = document()
    del made["stages"]["original"]
    assert "1024-px JPEGs" in own_time.verdict(made)["text"]
    assert "--image-size" not in own_time.verdict(made)["change"]


def test_the_block_for_the_readme_has_date_machine_versions_and_ratio() -> None:
    made = document()
    made["verdict"] = own_time.verdict(made)
    block = "\n".join(readme.comparison(made))
    for part in ("2026-01-02", "A <processor>, 2 cores", "torch 2.13.0", "20 (19 to 21)"):
        assert part in block


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="end of figures"):
        readme.rewritten("# A project")
