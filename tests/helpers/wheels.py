"""Packages that the environment of the tests lacks, for subprocesses: prebuilt wheels.

Each is installed into a folder of its own and is seen by the subprocess alone. Versions and hashes
are those of .ci/apart.txt. COCURVE_WHEELS says where the folders are kept (default
~/.cache/cocurve-lab/wheels).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LOCKED = Path(__file__).resolve().parents[2] / ".ci" / "apart.txt"
WHEELS = Path(os.environ.get("COCURVE_WHEELS") or "~/.cache/cocurve-lab/wheels").expanduser()
_UNREACHABLE = ("No matching distribution", "Could not find a version", "connection", "timed out")


def installed(name: str) -> Path:
    """A folder with a package, fetched where it is not there yet; skips where it cannot be."""
    found = re.search(rf"^{name}==(\S+) (?:.*\\\n)+.*$", LOCKED.read_text(), re.MULTILINE)
    assert found, f"{name} is not in {LOCKED}"
    requirement, version = found[0], found[1]
    folder = WHEELS / f"{name}-{version}-py{sys.version_info[0]}{sys.version_info[1]}"
    if (folder / name).is_dir():
        return folder
    WHEELS.mkdir(parents=True, exist_ok=True)
    with open(WHEELS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the test processes fetches it, the others wait
        if not (folder / name).is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            _fetch(partial, name, requirement)
            partial.rename(folder)
    return folder


def _fetch(folder: Path, name: str, requirement: str) -> None:
    file = folder.with_suffix(".txt")
    file.write_text(requirement + "\n")  # pip reads hashes from files only
    options = ["--require-hashes", "--only-binary=:all:", "--no-deps", "--target", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "-r", str(file)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=600,
    )
    if done.returncode and any(sign in done.stderr for sign in _UNREACHABLE):
        pytest.skip(f"no wheel of {name} can be had: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
