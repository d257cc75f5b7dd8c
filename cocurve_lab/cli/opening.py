"""`cocurve lab`: the notebooks out of the installed package, in JupyterLab."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..base.atomic import replacing
from ..base.errors import InputError
from ..models.identity import demo_folder
from .common import require_writable
from .options import Verb, argument, flag

FIRST = "01_build_H.ipynb"


@dataclass(frozen=True, kw_only=True)
class Lab(Verb):
    """Copy the notebooks into a folder and open the first one in JupyterLab.

    The pages explore_*.html, which need no Python, come along. A file that is there already is left
    as it is, so your changes stay. JupyterLab needs pip install 'cocurve-lab[lab]'.

    Examples:
      cocurve lab
      cocurve lab my_lab --copy
    """

    folder: Path | None = argument("FOLDER", "folder of the notebooks (notebooks)", nargs="?")
    copy: bool = flag("copy the files and open nothing")

    def run(self) -> int:
        """Run `cocurve lab`."""
        if not self.copy and find_spec("jupyterlab") is None:
            raise InputError(
                "JupyterLab is not installed. Run pip install 'cocurve-lab[lab]', or copy the "
                "notebooks alone with --copy."
            )
        folder = self.folder or Path("notebooks")
        require_writable(folder)
        copied = copy_notebooks(folder)
        print(f"{copied} files copied to {folder}; those that were there are left as they are.")
        if self.copy:
            return 0
        command = [sys.executable, "-m", "jupyterlab", str(folder / FIRST)]
        if hasattr(os, "getuid") and os.getuid() == 0:
            command.append("--allow-root")
        return subprocess.run(command, check=False).returncode


def copy_notebooks(folder: Path) -> int:
    """Copy the notebooks and pages that are not in a folder yet; return how many."""
    source = demo_folder().parent.parent / "notebooks"
    wanted = [path for path in sorted(source.iterdir()) if path.is_file()]
    missing = [path for path in wanted if not (folder / path.name).exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with replacing(folder / path.name) as temporary:  # what is there is never overwritten
            shutil.copyfile(path, temporary)
    return len(missing)
