"""What an exported page holds, what axe-core says of it, and Node.js to run its script."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import cocurve_lab as cl


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


def curvature_of(page: Path, units: cl.UnitSet | None = None) -> cl.Curvature:
    """H of a page, by default of the demo model."""
    packed = data_of(page)["lambda"]["_problem"]
    packed["matrix"] = base64.b64decode(packed["matrix"]["$bytes"])
    return cl.Curvature(matrix_of(packed), units or cl.enumerate_units(cl.load_model("demo")[0]))


def node(*arguments: str, **environment: str) -> str:
    """What the Node.js that comes with playwright prints."""
    from playwright._impl._driver import compute_driver_executable

    run = subprocess.run(
        [str(compute_driver_executable()[0]), "--no-warnings", *arguments],
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def serious_violations(page: Any, selector: str = "body") -> list[str]:
    """What axe-core calls serious or critical inside the elements, as "rule: element"."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context={"include": [selector]}).response["violations"]
    return [
        f"{fault['id']}: {node['html'][:100]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
