"""Make the README's pictures: every notebook in a real JupyterLab, its instrument as a PNG.

    python widgets/gallery/make_gallery.py            # about five minutes; H is built once

Needs what `make test` needs, and a browser at /usr/bin/chromium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.lab import Lab, running_lab  # noqa: E402  (found through the line above)

# notebook, picture, what to wait for in the page, theme
PICTURES = [
    ("02_lambda", "lambda", ".cocurve[data-paints]", "Light"),
    ("03_bridges", "bridges", ".cocurve canvas[data-draws]", "Light"),
    ("04_predicted_and_measured", "fidelity", ".js-plotly-plot .main-svg", "Light"),
    ("05_text_before_after", "text", ".cocurve", "Dark"),
]
LARGEST = 1_000_000  # bytes, all pictures together


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, running_lab(Path(folder)) as lab:
        for notebook, name, selector, theme in PICTURES:
            take(lab, ROOT / "notebooks" / f"{notebook}.ipynb", name, selector, theme)
    total = sum(path.stat().st_size for path in HERE.glob("*.png"))
    if total > LARGEST:
        raise SystemExit(f"the pictures have {total} bytes together, more than {LARGEST}")


def take(lab: Lab, notebook: Path, name: str, selector: str, theme: str) -> None:
    with lab.open(notebook) as visit:
        page = visit.page
        page.set_viewport_size({"width": 1280, "height": 1700})
        visit.run_all(timeout=1200)
        page.wait_for_selector(selector, state="attached", timeout=60_000)
        visit.theme(theme)
        page.wait_for_timeout(3000)
        shown: Any = page.locator(".jp-OutputArea-output", has=page.locator(selector)).first
        shown.scroll_into_view_if_needed()
        page.wait_for_timeout(500)
        path = HERE / f"{name}.png"
        shown.screenshot(path=str(path))
        visit.require_clean()
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
