"""The page of a gallery in a browser: its layout on a desktop and on a telephone, and what a user does there."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import sa1b.masks
from tests.gallery.test_gallery import line, made, scenes

__all__ = ["scenes"]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"

# A user: looks, shows the masks without a prediction, sorts, opens each image, selects a mask, and goes back.
PROBE = """<pre id="probe"></pre><script>addEventListener("load", async () => {
const all = (names, within = document) => [...within.querySelectorAll(names)], wait = () => new Promise((go) => setTimeout(go, 30));
const bounds = (each) => each.getBoundingClientRect(), width = document.documentElement.clientWidth;
const visible = (names, within) => all(names, within).filter((each) => bounds(each).width && each.checkVisibility());
const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
const overlapping = (parts) => parts.filter((part, at) => parts.slice(0, at).some((other) => overlap(part, other))).length;
const too_wide = () => visible(".picture, .stage, .phrases button, .chart, .chart svg, nav *")
  .filter((each) => bounds(each).right > width + 1 || bounds(each).left < -1).map((each) => each.outerHTML.slice(0, 60));
const found = {
  charts: visible(".chart").length, width: document.documentElement.scrollWidth - width, too_wide: too_wide(), orders: [], opened: [],
  stages: visible(".stage").map((each) => bounds(each).bottom), lists: visible(".phrases").length, dashed: [visible(".filtered").length],
  paths: Object.fromEntries(all(".picture").map((each) => [each.id,
    all(".stage:not(.twin) .mask", each).map((path) => path.getAttribute("d"))])),
};
document.querySelector("[data-layer=unscored]").click();
found.dashed.push(visible(".filtered").length);
for (const details of all("details")) details.open = true;
found.labels = visible(".chart").map((chart) => overlapping(all("text", chart).map(bounds)));
for (const order of ["masks", "image_id"]) {
  document.querySelector("select").value = order;
  document.querySelector("select").dispatchEvent(new Event("change"));
  found.orders.push(all(".picture").map((each) => each.id));
}
for (const picture of all(".picture")) {
  picture.querySelector(".stage").click();
  await wait();
  const first = picture.querySelector(".phrases button");
  first.click();
  const shown = visible(".stage, .phrases, .numbers", picture).map(bounds);
  found.opened.push({
    shown: visible(".picture").map(({id}) => id), listed: all(".phrases button", picture).length, top: shown[0].top,
    too_wide: too_wide(), overlapping: overlapping(shown), parts: shown.length,
    numbers: picture.querySelector(".numbers").textContent, pressed: first.getAttribute("aria-pressed"),
  });
  location.hash = "";
  await wait();
}
document.querySelector("#probe").textContent = JSON.stringify(found);
});</script>"""
# An iframe, because windows are never narrower than 500 pixels.
FRAME = """<!doctype html><pre id="found"></pre>
<iframe style="border: 0; width: {width}px; height: 844px" srcdoc="{page}"></iframe>
<script>setInterval(() => {{
  const probe = document.querySelector("iframe").contentDocument.querySelector("#probe");
  if (probe?.textContent) document.querySelector("#found").textContent = probe.textContent;
}}, 100);</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [1400, 390])
def test_a_user_finds_every_mask(scenes: Path, width: int, tmp_path: Path) -> None:
    phrased = line(scenes, 101, [0, 1, 2], phrase="a phrase of several words " * 3)
    (tmp_path / "predictions.jsonl").write_text(line(scenes, 100, [1, 2, 3]) + phrased)
    page, _ = made(scenes, tmp_path, "--predictions", tmp_path / "predictions.jsonl")
    text = page.text.replace("</body>", f"{PROBE}</body>")
    file = tmp_path / "frame.html"
    file.write_text(FRAME.format(width=width, page=html.escape(text)), encoding="utf-8")
    more = [
        "--virtual-time-budget=5000",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        file.as_uri(),
    ]
    command = [str(BROWSER), *FLAGS.split(), *more]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    match = re.search(r'<pre id="found">(.+?)</pre>', dom, re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(html.unescape(match[1]))
    assert (found["width"], found["too_wide"]) == (0, [])
    # All images, above the fold of a telephone, with the charts only where there is space, and few lines on them.
    assert found["charts"] == (4 if width > 900 else 0)
    assert found["labels"] == [0] * 4
    assert len(found["stages"]) == 4
    assert found["stages"][0] < 844
    assert found["lists"] == 0
    assert found["dashed"][0] == 0 < found["dashed"][1]
    assert sorted(found["orders"][0]) == found["orders"][1] == ["sa_100", "sa_101"]
    # One image, with the list of its masks and their numbers.
    assert [opened.pop("shown") for opened in found["opened"]] == [["sa_100"], ["sa_101"]]
    for opened, word in zip(found["opened"], ("IoU of the model", "a phrase of several words"), strict=True):
        assert opened.pop("listed") == 3
        assert opened.pop("top") < 200
        numbers = opened.pop("numbers")
        assert all(name in numbers for name in ("1 of 3", "stability_score", "predicted_iou", "bbox", word))
        assert opened == {"too_wide": [], "overlapping": 0, "parts": 4, "pressed": "true"}
    # What is drawn are the masks' pixels, exactly.
    for image_id, data in page.pictures.items():
        size = data["height"], data["width"]
        masks = sa1b.masks.rasterize(sa1b.masks.decode(data["counts"], *size))
        for mask, path in zip(masks, found["paths"][f"sa_{image_id}"], strict=True):
            assert np.array_equal(filled(path, *size), mask)


def filled(path: str, height: int, width: int) -> npt.NDArray[np.int64]:
    """The pixels inside a path: those with an odd number of its vertical edges to the left, [height, width]."""
    edges = np.zeros((height, width + 1), np.int64)
    for loop in path.split("z")[:-1]:
        first, *steps = re.findall(r"[MHV][\d ]+", loop)
        x, y = map(int, first[1:].split())
        for step in [*steps, f"H{x}", f"V{y}"]:
            to = int(step[1:])
            if step[0] == "V":
                edges[min(y, to) : max(y, to), x] += 1
            x, y = (x, to) if step[0] == "V" else (to, y)
    return edges.cumsum(axis=1)[:, :-1] % 2
