"""Make the README's pictures: every notebook in a real JupyterLab, its instrument as a PNG.

    python widgets/gallery/make_gallery.py            # about five minutes; H is built once
    python widgets/gallery/make_gallery.py slider     # one of them, of the page: seconds

slider.png is an animated PNG. Needs what `make test` needs, and a browser at /usr/bin/chromium.
"""

from __future__ import annotations

import io
import itertools
import struct
import sys
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.lab import CHROMIUM, FLAGS, Lab, running_lab  # noqa: E402  (found by the line above)

# notebook, picture, what to wait for in the page, theme
PICTURES = [
    ("03_bridges", "bridges", ".cocurve canvas[data-draws]", "Light"),
    ("04_predicted_and_measured", "fidelity", ".cocurve-fidelity .scatterlayer", "Light"),
    ("05_text_before_after", "text", ".cocurve", "Dark"),
]
STRENGTHS = (1, 0.75, 0.5, 0.25, 0)  # of those measured on SmolLM2; a still picture shows the first
TYPED = "(box, value) => { box.value = value; box.dispatchEvent(new Event('change')) }"
LARGEST = 1_000_000  # bytes, all pictures together


def main() -> None:
    asked = sys.argv[1:] or ["slider", *(name for _, name, *_ in PICTURES)]
    if "slider" in asked:
        moving()
    mine = [picture for picture in PICTURES if picture[1] in asked]
    if not mine:
        return
    with tempfile.TemporaryDirectory() as folder, running_lab(Path(folder)) as lab:
        for notebook, name, selector, theme in mine:
            take(lab, ROOT / "notebooks" / f"{notebook}.ipynb", name, selector, theme)
    total = sum(path.stat().st_size for path in HERE.glob("*.png"))
    if total > LARGEST:
        raise SystemExit(f"the pictures have {total} bytes together, more than {LARGEST}")


def moving() -> None:
    """Move λ on the page of SmolLM2 and write the frames as one animated PNG."""
    frames = []
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = chromium.new_page(viewport={"width": 1000, "height": 810}, device_scale_factor=0.72)
        page.goto((ROOT / "notebooks" / "explore_smollm2.html").as_uri())
        page.wait_for_selector(".cocurve[data-paints]")
        page.get_by_role("button", name="Skip").click()
        for strength in STRENGTHS:
            page.get_by_label("lambda, typed").evaluate(TYPED, strength)
            page.wait_for_timeout(700)
            frames.append(page.screenshot(clip={"x": 0, "y": 88, "width": 1000, "height": 580}))
    path = HERE / "slider.png"
    path.write_bytes(animated(frames, milliseconds=1000))
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def animated(frames: list[bytes], milliseconds: int) -> bytes:
    """PNG files of one size as an endless APNG (W3C PNG, third edition, section 11.3.4)."""
    parts = [chunks(frame) for frame in frames]
    header = parts[0]["IHDR"]
    written = [b"\x89PNG\r\n\x1a\n", chunk("IHDR", header)]
    written.append(chunk("acTL", struct.pack(">II", len(frames), 0)))
    timing = header[:8] + bytes(8) + struct.pack(">HHBB", milliseconds, 1000, 0, 0)
    numbers = (struct.pack(">I", number) for number in itertools.count())
    for frame in parts:
        written.append(chunk("fcTL", next(numbers) + timing))
        if frame is parts[0]:
            written.append(chunk("IDAT", frame["IDAT"]))
        else:
            written.append(chunk("fdAT", next(numbers) + frame["IDAT"]))
    return b"".join([*written, chunk("IEND", b"")])


def chunks(png: bytes) -> dict[str, bytes]:
    """The data of each kind of chunk, joined."""
    found: dict[str, bytes] = defaultdict(bytes)
    stream = io.BytesIO(png[8:])
    while head := stream.read(8):
        size, kind = struct.unpack(">I4s", head)
        found[kind.decode()] += stream.read(size + 4)[:size]  # without the checksum
    return found


def chunk(kind: str, data: bytes) -> bytes:
    body = kind.encode() + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def take(lab: Lab, notebook: Path, name: str, selector: str, theme: str) -> None:
    with lab.open(notebook) as visit:
        page = visit.page
        page.set_viewport_size({"width": 1280, "height": 1700})
        visit.run_all(timeout=1200)
        page.wait_for_selector(selector, state="attached", timeout=60_000)
        visit.theme(theme)
        if name == "text":
            visit.set("compare", ratio=0.4)
            page.get_by_role("button", name="Generate", exact=True).click()
            page.locator("p:visible", has_text="written together").first.wait_for()
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
