"""The layout of the page in a browser, at the widths of a desktop and of a telephone."""

import html
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sa1b.masks import geometry
from sa1b.programs.gallery.chart import Survey, charts
from sa1b.programs.gallery.members import Choice
from sa1b.programs.gallery.page import write_gallery
from sa1b.programs.synthetic import source_tars as synthetic
from sa1b.shards.commit import write_dataset
from sa1b.shards.dataset import Dataset
from sa1b.shards.manifest import read_tasks
from sa1b.shards.predictions import Predicted
from tests.gallery.browser import BROWSER, dump_dom
from tests.shards.tiny import ingest_tar

# Runs at the end of the page, before the first frame: reports the drawn elements and those that do not fit.
PROBE = """<pre id="probe"></pre><script>addEventListener("load", () => {
const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
const boxes = (chart) => [...chart.querySelectorAll("text")].map((each) => [each.textContent, each.getBoundingClientRect()]);
const width = document.documentElement.clientWidth, charts = document.querySelector(".charts");
const bounds = (each) => each.getBoundingClientRect();
const visible = (names) => [...document.querySelectorAll(names)].filter((each) => bounds(each).width);
const dashed = () => visible(".filtered").length;
const too_wide = () => visible(".picture, .stage, .phrases button, .chart, .chart svg")
  .filter((each) => bounds(each).right > width || bounds(each).left < 0).length;
const all = {
  charts: charts.open,
  stages: pictures.map((each) => bounds(each.querySelector(".stage"))).map(({top, bottom}) => [top, bottom]),
  dashed: [dashed(), (toggle(document.querySelector("[data-layer=unscored]")), dashed())],
  lists: visible(".phrases").length,
};
charts.open = true;
document.querySelector("#probe").textContent = JSON.stringify({
  ...all,
  drawn: pictures.map((each) => each.querySelectorAll(".stage .mask").length),
  phrases: document.querySelectorAll(".phrases button").length,
  without_image: [...document.querySelectorAll(".stage img")].filter((each) => !each.src).length,
  width: document.documentElement.scrollWidth - width,
  too_wide: too_wide(),
  overlapping: [...document.querySelectorAll(".chart")].flatMap((chart) => boxes(chart).flatMap(([text, box], at) =>
    boxes(chart).slice(0, at).filter(([, other]) => overlap(box, other)).map(([other]) => [other, text]))),
  opened: pictures.map((each) => {
    location.hash = each.id;
    follow();
    const parts = [...each.querySelectorAll(".stage, .phrases, .numbers")].map(bounds);
    return {
      shown: visible(".picture").map(({id}) => id), listed: each.querySelectorAll(".phrases button").length,
      top: parts[0].top, too_wide: too_wide(), empty: parts.filter(({width, height}) => !width || !height).length,
      overlapping: parts.filter((part, at) => parts.slice(0, at).some((other) => overlap(part, other))).length,
    };
  }),
  back: (location.hash = "", follow(), visible(".picture").length),
});
});</script>"""
# An iframe, because windows are never narrower than 500 pixels.
FRAME = """<!doctype html><pre id="found"></pre>
<iframe style="border: 0; width: {width}px; height: 844px" srcdoc="{page}"></iframe>
<script>const frame = document.querySelector("iframe");
frame.addEventListener("load", () => setTimeout(() => {{
  document.querySelector("#found").textContent = frame.contentDocument.querySelector("#probe").textContent;
}}, 0));</script>"""


def probe(page: Path, width: int, folder: Path) -> dict[str, Any]:
    """The report of the page in an iframe of this width."""
    text = page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>")
    file = folder / "frame.html"
    file.write_text(FRAME.format(width=width, page=html.escape(text)), encoding="utf-8")
    match = re.search(r'<pre id="found">(.+?)</pre>', dump_dom(file, folder / "profile"), re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two images with predictions for half of their masks, for one of them from phrases."""
    folder = tmp_path_factory.mktemp("page")
    synthetic.write_tar(folder / "sa_000001.tar", images=2, first_id=100, long_side=160)
    ingest_tar(folder / "sa_000001.tar", folder / "root")
    write_dataset(folder / "root", read_tasks(folder / "root"))
    lines = []
    for sample in Dataset(folder / "root"):
        chosen = np.arange(0, len(sample.annotations), 2)
        runs = geometry.flip_horizontal(sample.annotations.runs(chosen))
        points = np.full((len(chosen), 2), 5.0)
        phrases = tuple(f"a phrase {'of several words ' * (row % 4)}" for row in chosen) if not lines else ()
        one = Predicted(sample.annotations.mask_id[chosen], points, chosen / 100, chosen / 100, runs, phrases)
        lines.append(one.line(sample.image_id))
    (folder / "predictions.jsonl").write_text("".join(lines))
    write_gallery(
        folder / "root", folder / "page.html", Choice(), predictions=folder / "predictions.jsonl", quiet=True
    )
    return folder / "page.html"


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1400, 390])
def test_all_is_drawn_before_the_first_frame_and_fits(page: Path, width: int, tmp_path: Path) -> None:
    found = probe(page, width, tmp_path)
    assert len(found["drawn"]) == 2
    assert all(number > 0 for number in found["drawn"])
    assert found["without_image"] == 0
    assert found["phrases"] > 0
    assert found["width"] <= 0
    assert found["too_wide"] == 0
    assert found["overlapping"] == []
    # All images, above the fold of a telephone, with the charts only where there is space, and few lines on them.
    assert found["charts"] == (width > 900)
    assert found["stages"][0][1] < 844
    assert found["lists"] == 0
    assert found["dashed"][0] == 0 < found["dashed"][1]
    # One image, with the list of its masks and their numbers.
    assert sorted(opened.pop("shown") for opened in found["opened"]) == [["sa_100"], ["sa_101"]]
    for opened in found["opened"]:
        assert opened.pop("listed") > 0
        assert opened.pop("top") < 200
        assert opened == {"too_wide": 0, "empty": 0, "overlapping": 0}
    assert found["back"] == 2


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("area", [1e-9, 1e-7, 1e-3, 1.0]),
        ("area", [2e-6, 3e-6]),
        ("predicted_iou", [0.951, 0.952, 0.957]),
        ("stability_score", [0.5]),
        ("masks_per_image", [1, 1000]),
    ],
)
def test_labels_of_an_axis_do_not_overlap_whatever_its_range(name: str, values: list[float]) -> None:
    survey = Survey()
    getattr(survey, name).add(np.array(values))
    drawn = charts(survey)
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="middle">([^<]+)</text>', drawn)
    along = sorted((float(x), text) for x, y, text in labels if y == labels[0][1])
    assert len(along) >= 1
    for (left, first), (right, second) in pairwise(along):
        assert right - left >= (len(first) + len(second)) / 2 * 6.5  # wider than a digit of 11 pixels
