"""Open files for reading: regular files only, without waiting, and up to a size; where ours lie.

A path may lead to anything. Opening a FIFO waits for ever for a writer, and a device has no end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from .errors import FileFormatError, shown

# of a file that is read as a whole, unpacked; text takes several times as much, and JSON ten times
MOST_BYTES, MOST_JSON, MOST_STORED = 1 << 30, 1 << 28, 64 << 30


def open_regular(path: str | os.PathLike[str], at_most: int = MOST_BYTES) -> BinaryIO:
    """Open a regular file; FileFormatError for any other kind, and above `at_most` bytes."""
    path = os.fspath(path)
    if "\0" in path:
        raise FileFormatError(f"{shown(path)} is no path: it holds a zero byte. Check the path.")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(found.st_mode):
            kind = "FIFO" if stat.S_ISFIFO(found.st_mode) else "device or socket"
            raise FileFormatError(f"{path} is a {kind}, not a regular file. Give a regular file.")
        if found.st_size > at_most:
            raise FileFormatError(
                f"{path} has {found.st_size:,} bytes; at most {at_most:,} are read. Give a part of "
                "it, or check the path."
            )
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: str | os.PathLike[str], at_most: int = MOST_BYTES) -> bytes:
    """Read a regular file as a whole; errors as from `open_regular`."""
    with open_regular(path, at_most) as file:
        return file.read()


def require_regular(path: str | os.PathLike[str], at_most: int = 1 << 62) -> None:
    """Check a file that another package will open; errors as from `open_regular`."""
    open_regular(path, at_most).close()


def require_regular_files(folder: Path) -> None:
    """Check each file of a folder, if there is one; JSON, which is read as a whole, by size too."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not path.is_dir():  # a link may lead nowhere
            require_regular(path, MOST_JSON if path.suffix == ".json" else 1 << 62)


def demo_folder() -> Path:
    """Return the folder of the embedded model: in an installed wheel, else beside the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "data" / "demo"
    return installed if installed.exists() else package.parent / "data" / "demo"
