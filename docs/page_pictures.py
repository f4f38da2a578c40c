"""Draw docs/reference/report-page*.png: the report page of two runs of the demo, in the machine's Chromium.

    python -m gradiometer.demo --run-dir demo-a
    python -m gradiometer.demo --run-dir demo-b --seed 1
    python docs/page_pictures.py demo-a demo-b

Needs playwright and Pillow, which the development tools install.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from gradiometer.web import write_page

FOLDER = Path(__file__).parent / "reference"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
# the name of each picture, its width, its scheme, what is selected, and the largest height
PICTURES = (
    ("report-page", 1280, "light", "tensor=blocks.0.qkv.weight", 2000),
    ("report-page-narrow", 400, "light", "", 1560),
    ("report-page-two-runs", 1280, "dark", "steps=119.5+185.5", 1420),
)


def main() -> None:
    """Draw the first run, the first on a narrow screen, and both."""
    first, other = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, width, scheme, selected, height in PICTURES:
            both = {"other": other} if "two" in name else {}
            path = write_page(first, Path(folder) / f"{name}.html", **both)
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto(f"{path.as_uri()}#{selected}")
            page.wait_for_selector("html[data-ready]", state="attached")
            whole = Image.open(io.BytesIO(page.screenshot(full_page=True)))
            picture = whole.crop((0, 0, width, min(height, whole.height)))
            picture.convert("RGB").quantize(256, kmeans=2).save(FOLDER / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
