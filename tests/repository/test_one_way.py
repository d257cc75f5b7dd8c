"""One way in and one way out: files are opened, and temporary names made, in few places."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cocurve_lab", "widgets/cocurve_widgets", "notebooks/cocurve_studies")
READS = {
    *("open", "safe_open", "load_file", "json.load", "json.loads", "np.load", "torch.load"),
    *("pickle.load", "pickle.loads", "np.fromfile", "np.memmap", "gzip.open", "os.open"),
}
METHODS = {"read_text", "read_bytes"}
TEMPORARY = {"mkdtemp", "mkstemp", "mktemp", "TemporaryDirectory", "NamedTemporaryFile"}
ALLOWED = {
    "cocurve_lab/base/files.py": {"os.open"},  # the guard itself
    "cocurve_lab/base/atomic.py": {"os.open"},  # locks, and files to sync
    "cocurve_lab/base/memory.py": {  # the kernel's own, of size 0
        "(folder / name).read_text",
        "(group / 'memory.stat').read_text",
        "own.read_text",
    },
    "cocurve_lab/base/schema.py": {"json.loads"},  # the parser
    "cocurve_lab/base/storage.py": {"json.loads"},  # of what it dumped just before
    "cocurve_lab/__main__.py": {"os.open"},  # /dev/null, to write
    "cocurve_lab/evaluation/runner.py": {"os.open"},  # /dev/null
    "cocurve_lab/extensions/big_models/on_disk.py": {"load_file"},  # what it wrote just before
    "cocurve_lab/extensions/opening/files.py": {"safe_open"},  # after the guard
    "cocurve_lab/extensions/texts/records.py": {"gzip.open"},  # of a file that the guard opened
    "cocurve_lab/extensions/publishing/configuration.py": {"json.loads"},  # the same
    "cocurve_lab/models/identity.py": {"json.loads"},  # of what it dumped just before
    "cocurve_lab/models/layers.py": {"load_file"},  # after the guard
}


def calls() -> dict[str, set[str]]:
    """The calls of each file that read or make temporary names, as they are written."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                name = ast.unparse(node.func)
                last = name.rpartition(".")[2]
                method = isinstance(node.func, ast.Attribute) and last in METHODS
                if name in READS or last in TEMPORARY or method:
                    found.setdefault(str(path.relative_to(ROOT)), set()).add(name)
    return found


def test_files_are_read_through_the_one_guard() -> None:
    assert calls() == ALLOWED
