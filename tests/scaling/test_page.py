"""The page: self-contained, with a curve for each precision and a bar for each case."""

import re
from html.parser import HTMLParser

from sa1b.programs.scaling.page import judge, page
from sa1b.programs.scaling.result import CaseResult, Scaling
from tests.scaling.measured import case, result, scaling


def both() -> Scaling:
    results = {
        case(ranks, mode=mode, precision=precision): result(0.1 * ranks**0.2, 0.01, 0.02)
        for mode in ("ddp", "fsdp-full")
        for precision in ("fp32", "bf16")
        for ranks in (1, 2, 4)
    }
    return scaling(results, root="a <root>")


def test_curves_bars_verdict_and_table() -> None:
    found = both()
    text = page(found, judge(found))
    assert text.count("<svg") == 2  # one for each precision
    assert len(re.findall(r'<div class="row', text)) == 12
    assert text.count('class="stage s3" style') == 12  # communication
    assert text.count('class="stage s2" style') == 12  # data
    assert judge(found).lines[0] in text
    assert "a &lt;root&gt;" in text
    assert "<!--" not in text
    assert not re.search(r"(src|href)=", text)


def test_the_page_is_well_formed() -> None:
    found = both()
    opened: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in ("meta", "path", "circle", "br"):
                opened.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag not in ("path", "circle"):
                assert opened.pop() == tag

    Parser().feed(page(found, judge(found)))
    assert opened == []


def test_points_are_at_their_speed_up_and_the_ideal_is_a_line() -> None:
    found = scaling({case(1): result(0.1), case(2): result(0.1), case(4): result(0.1)})
    text = page(found, judge(found))
    ideal = re.findall(r'class="ideal" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', text)
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text)
    assert (*points[0], *points[-1]) == ideal[0]  # without loss, the curve is the ideal one


def test_a_measurement_that_failed_has_a_page_too() -> None:
    found = scaling({case(1): CaseResult((), "lost"), case(2): CaseResult((), "lost")})
    assert "All cases failed." in page(found, judge(found))
