"""The images of README.md and docs/index.md: screenshots of the demo's gallery, light and dark.

    python -m benchmarks.picture                        synthetic images with their masks, in half a minute
    python -m benchmarks.picture demo/gallery.html      the page of `make demo`, with the masks of a model

Writes docs/images/gallery.png and gallery-dark.png, 256 colours. Needs Chromium.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from sa1b.programs.gallery.members import Choice
from sa1b.programs.gallery.page import write_gallery
from sa1b.programs.synthetic.source_tars import write_tar

REPOSITORY = Path(__file__).parents[1]
OUT = REPOSITORY / "docs" / "images"
SCHEMES = {"gallery-dark.png": 0, "gallery.png": 1}  # Chromium's number of the colour scheme
WINDOW = (1280, 1040)  # pixels of the browser
# The facts about the input would take a third of the image.
STYLE = "<style>header dl, header details:not(.charts), .charts summary { display: none !important }</style>"
WIDTH = 960  # pixels of the image


def shoot(page: Path, folder: Path, scheme: int) -> Image.Image:
    """The page, without the facts about its input, as a browser window of WINDOW pixels shows it.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("no Chromium on PATH: install the package chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    flags.append(f"--blink-settings=preferredColorScheme={scheme}")
    size = f"--window-size={WINDOW[0]},{WINDOW[1]}"
    shot = f"--screenshot={folder / 'shot.png'}"
    copy = folder / "page.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</head>", f"{STYLE}</head>"), encoding="utf-8")
    command = [browser, *flags, f"--user-data-dir={folder / 'profile'}", size, shot, copy.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(folder / "shot.png") as image:
        return image.convert("RGB")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if len(sys.argv) > 1:
            page = Path(sys.argv[1])
        else:
            page = folder / "gallery.html"
            write_tar(folder / "sa_000000.tar", images=60, first_id=1, long_side=640)
            write_gallery(folder / "sa_000000.tar", page, Choice(count=4), sort="masks")
        for name, scheme in SCHEMES.items():
            image = shoot(page, folder, scheme)
            small = image.resize((WIDTH, WIDTH * image.height // image.width), Image.Resampling.LANCZOS)
            small.quantize(256, dither=Image.Dither.NONE).save(OUT / name, optimize=True)
            print(f"{OUT / name}: {(OUT / name).stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
