"""A headless browser, for tests of the gallery's page."""

import shutil
import subprocess
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--virtual-time-budget=5000"),
)


def dump_dom(file: Path, profile: Path) -> str:
    """The HTML of a page after its scripts have run.

    Args:
        file: the page.
        profile: an empty folder for the browser.
    """
    command = [str(BROWSER), *_FLAGS, f"--user-data-dir={profile}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
