"""A page of one instrument without a kernel, and what an exported page holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from cocurve_widgets.instrument import front
from cocurve_widgets.packing import plain

ALONE = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>:root { color-scheme: light dark } body { margin: 0 } %s</style><div id="here"></div>
<script type="module">%s
const model = window.model = localModel(JSON.parse(%s, revive));
const { on, off } = model;
window.heard = 0;  // handlers that follow the model
model.on = (...both) => { window.heard += 1; on(...both); };
model.off = (...both) => { window.heard -= 1; off(...both); };
window.stop = %s({ model, el: document.getElementById("here") });
document.querySelector(".cocurve").classList.add("cc-page");
</script>"""


def page_of(path: Path, module: str, render: str, state: dict) -> Path:
    """A file with one instrument on a state; `render` is the function of its front end's module."""
    script = front(module, "local.js")
    data = json.dumps(json.dumps(plain(state))).replace("<", "\\u003c")
    path.write_text(ALONE % (front("instrument.css"), script, data, render), encoding="utf-8")
    return path


def data_of(path: Path) -> dict:
    """The JSON inside a page that `export_html` wrote."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="cocurve-data">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def matrix_of(packed: dict) -> np.ndarray:
    """H [M, M] float64 as the page unpacks it from `pack_problem`'s bytes."""
    size, raw = len(packed["costs"]), packed["matrix"]
    kind = "<f8" if len(raw) == 4 * size * (size + 1) else "<f4"
    upper = np.zeros((size, size))
    upper[np.triu_indices(size)] = np.frombuffer(raw, kind)
    return upper + np.triu(upper, 1).T
