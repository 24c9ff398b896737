"""A folder with the page of rebuilt samples: their images, and the masks with their prompts in order."""

import base64
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from sa1b.console import counted
from sa1b.programs.seen.replayed import Drawing, Replayed, by_loss, number_text
from sa1b.shards.display import encoded

_SHOWN = 12  # masks of an image; the others are listed as text
_TINT = (255, 140, 0, 120)  # RGB and opacity of a mask
_AROUND = 0.3  # of the size of a mask and its prompts, on each side of it


def write_page(out: Path, title: str, replayed: Sequence[Replayed]) -> None:
    """Write OUT/index.html and the images; OUT is new."""
    out.mkdir(parents=True)
    legend = (
        "Points and coordinates are prompts in the order of the iterations: + foreground, \u2212 background."
    )
    notes, sections = {f"<p>{legend}</p>": None}, list[str]()
    for one in replayed:
        notes |= dict.fromkeys(f'<p class="warning">{escape(change)}</p>' for change in one.changes)
        notes |= dict.fromkeys([f"<p>Prompts: {escape(one.prompts)}</p>"] if one.prompts else [])
        pairs = {
            sample["position"]: drawing for sample, drawing in zip(one.samples, one.drawings, strict=True)
        }
        for sample in by_loss(one.samples):
            sections.append(
                _section(out, one.step, sample, pairs[sample["position"]], several=len(replayed) > 1)
            )
    if not any("prompts" in mask for one in replayed for sample in one.samples for mask in sample["masks"]):
        del notes[f"<p>{legend}</p>"]
    fields = {"TITLE": escape(title), "NOTES": "\n".join(notes), "SAMPLES": "\n".join(sections)}
    template = files("sa1b.programs.seen").joinpath("page.html").read_text(encoding="utf-8")
    page = re.sub(r"<!--([A-Z]+)-->", lambda match: fields[match[1]], template)
    (out / "index.html").write_text(page, encoding="utf-8")


def _section(out: Path, step: int, sample: dict[str, Any], drawing: Drawing, *, several: bool) -> str:
    name = str(sample["position"])
    (out / f"{name}.png").write_bytes(drawing.overlay())
    (out / f"{name}.jpg").write_bytes(encoded(Image.fromarray(drawing.pixels), "JPEG"))
    number = {mask["mask_index"]: i for i, mask in enumerate(sample["masks"])}
    masks = by_loss(sample["masks"])
    cards = [_card(f"{name}.jpg", mask, drawing, number[mask["mask_index"]]) for mask in masks[:_SHOWN]]
    more = "".join(f"<p>{_described(mask)}</p>" for mask in masks[_SHOWN:])
    rest = (
        f"<details><summary>{counted(len(masks) - _SHOWN, 'other mask')}</summary>{more}</details>"
        if more
        else ""
    )
    facts = [f"step {step:,}"] * several + [f"position {sample['position']:,}", counted(len(masks), "mask")]
    facts += ["mirrored"] * sample["mirrored"]
    facts += [f"loss {number_text(sample['loss'])}"] if "loss" in sample else []
    source = f"{escape(sample['source'])}: " if sample["source"] else ""
    return (
        f"<section><h2>{source}image {sample['image_id']} <small>{', '.join(facts)}</small></h2>"
        f'<div class="sample"><img src="{name}.png" alt="image with all masks" loading="lazy">'
        f'<div><div class="masks">{"".join(cards)}</div>{rest}</div></div></section>'
    )


def _card(image: str, mask: dict[str, Any], drawing: Drawing, number: int) -> str:
    dense = drawing.dense(number)
    height, width = dense.shape
    rows, columns = np.flatnonzero(dense.any(axis=1)), np.flatnonzero(dense.any(axis=0))
    corners = (
        [(columns[0], rows[0]), (columns[-1] + 1, rows[-1] + 1)] if len(rows) else [(0, 0), (width, height)]
    )
    for prompt in mask.get("prompts", ()):
        corners += [(x + 0.5, y + 0.5) for x, y in zip(prompt["at"][::2], prompt["at"][1::2], strict=True)]
    low, high = np.array(corners, float).min(axis=0), np.array(corners, float).max(axis=0)
    side = float((high - low).max()) * (1 + 2 * _AROUND) + 4
    left, top = ((low + high - side) / 2).tolist()
    drawn = "".join(_drawn(prompt, side) for prompt in mask.get("prompts", ()))
    return (
        f'<figure><svg viewBox="{left:.2f} {top:.2f} {side:.2f} {side:.2f}" role="img" '
        f'aria-label="mask {mask["mask_id"]} and its prompts">'
        f'<image href="{image}" width="{width}" height="{height}"/>'
        f'<image href="{_tinted(dense)}" width="{width}" height="{height}"/>{drawn}</svg>'
        f"<figcaption>{_described(mask)}</figcaption></figure>"
    )


def _drawn(prompt: dict[str, Any], side: float) -> str:
    """A prompt as SVG: a box, or a point with the number of its iteration."""
    at = [one + 0.5 for one in prompt["at"]]
    if prompt["kind"] == "box":
        x, y, right, bottom = at
        return (
            f'<rect class="box" x="{x:.2f}" y="{y:.2f}" width="{right - x:.2f}" height="{bottom - y:.2f}"/>'
        )
    radius = side / 22
    return (
        f'<circle class="{prompt["kind"]}" cx="{at[0]:.2f}" cy="{at[1]:.2f}" r="{radius:.2f}"/>'
        f'<text x="{at[0]:.2f}" y="{at[1]:.2f}" font-size="{1.3 * radius:.2f}">{prompt["iteration"]}</text>'
    )


def _described(mask: dict[str, Any]) -> str:
    signs = {"box": "box", "foreground": "+", "background": "\u2212"}
    prompts = "; ".join(
        f"{one['iteration']} {signs[one['kind']]} {', '.join(f'{number:.1f}' for number in one['at'])}"
        for one in mask.get("prompts", ())
    )
    figures = ""
    if "ious" in mask:
        loss = f"loss {number_text(mask['loss'])}" if "loss" in mask else "no pixel in the targets"
        ious = " \u2192 ".join(f"{one:.2f}" for one in mask["ious"])
        figures = f", {loss}, IoU {ious}"
    return f"mask {mask['mask_id']}{figures}<br><span>{prompts}</span>"


def _tinted(dense: npt.NDArray[np.uint8]) -> str:
    """A mask as a transparent PNG in a URL."""
    pixels = np.where(dense[:, :, None] > 0, np.array(_TINT, np.uint8), np.uint8(0)).astype(np.uint8)
    data = encoded(Image.fromarray(pixels, "RGBA").quantize(2), "PNG")
    return f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
