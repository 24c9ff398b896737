"""The images of README.md, docs/index.md and docs/evaluation.md: screenshots of galleries, light and dark.

    python -m benchmarks.picture                        gallery.png: a landscape with its masks
    python -m benchmarks.picture demo/gallery.html      predictions.png: the page of `make demo`

Writes them and gallery-dark.png to docs/images, 256 colours. Needs Chromium.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from benchmarks.landscape import landscape
from sa1b import reshard
from sa1b.masks import Runs, bbox_sa1b
from sa1b.programs.gallery.verb_gallery import main as gallery

REPOSITORY = Path(__file__).parents[1]
OUT = REPOSITORY / "docs" / "images"
SCHEMES = {"-dark": 0, "": 1}  # Chromium's number of the colour scheme
WINDOW = (1280, 800)  # pixels of the browser
# The facts about the input would take a third of the image.
STYLE = "<style>header dl, header details:not(.charts), .charts summary { display: none !important }</style>"
WIDTH = 960  # pixels of the image


def write_pair(folder: Path) -> None:
    """Write a landscape and its masks in SA-1B's form."""
    image, parts = landscape()
    height, width = image.shape[:2]
    Image.fromarray(image).save(folder / "sa_1.jpg", quality=95)
    runs = Runs.from_pixels(np.stack(parts))
    annotations = []
    for number, (coco, box, part) in enumerate(zip(runs.to_coco(), bbox_sa1b(runs), parts, strict=True)):
        depth = cv2.distanceTransform(np.pad(part, 1).astype(np.uint8), cv2.DIST_L2, 5)[1:-1, 1:-1]
        row, column = np.unravel_index(depth.argmax(), depth.shape)
        annotations.append(
            {
                "id": number + 1,
                "segmentation": {"size": [height, width], "counts": coco["counts"].decode()},
                "area": int(part.sum()),
                "bbox": [float(value) for value in box],
                "predicted_iou": 0.9 + 0.004 * number,
                "stability_score": 0.99 - 0.0015 * number,
                "point_coords": [[float(column), float(row)]],
                "crop_box": [0.0, 0.0, float(width), float(height)],
            }
        )
    about = {"image_id": 1, "width": width, "height": height, "file_name": "sa_1.jpg"}
    (folder / "sa_1.json").write_text(json.dumps({"image": about, "annotations": annotations}))


def shoot(page: Path, folder: Path, scheme: int, opened: str) -> Image.Image:
    """The page, without the facts about its input, as a browser window of WINDOW pixels shows it; `opened`:
    the image that is open, with a selected mask.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("no Chromium on PATH: install the package chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    flags.append(f"--blink-settings=preferredColorScheme={scheme}")
    shot = f"--screenshot={folder / 'shot.png'}"
    copy = folder / "page.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</head>", f"{STYLE}</head>"), encoding="utf-8")
    command = [
        browser,
        *flags,
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={WINDOW[0]},{WINDOW[1]}",
        shot,
        f"{copy.as_uri()}{opened}",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(folder / "shot.png") as image:
        return image.convert("RGB")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if len(sys.argv) > 1:
            page, kind, opened = Path(sys.argv[1]), "predictions", ""
        else:
            page, kind, opened = folder / "gallery.html", "gallery", "#sa_1/7"
            (folder / "photos").mkdir()
            write_pair(folder / "photos")
            reshard([folder / "photos"], folder / "shards", workers=1, quiet=True)
            gallery(str(folder / "shards"), out=page)
        for suffix, scheme in SCHEMES.items():
            if suffix and kind == "predictions":
                continue  # the page has a link in Markdown, which has one image
            name = f"{kind}{suffix}.png"
            image = shoot(page, folder, scheme, opened)
            small = image.resize((WIDTH, WIDTH * image.height // image.width), Image.Resampling.LANCZOS)
            small.quantize(256, dither=Image.Dither.NONE).save(OUT / name, optimize=True)
            print(f"{OUT / name}: {(OUT / name).stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
