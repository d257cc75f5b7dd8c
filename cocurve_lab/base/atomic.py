"""Atomic replacement of files and folders: after a crash, either the old or the new version exists.

Data is written into a locked sibling folder, `.cocurve-1a2b3c4d.partial`. The lock ends with the
process, however that ends, so the next write beside it recognizes and removes what was left behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import NoRoomError

PARTIAL = f".cocurve-{'[0-9a-f]' * 8}.partial"
_LOCK, _NEW, _OLD = "lock", "new", "old"  # inside a partial folder
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)  # a full disk, or a user's quota
_LOST = (*_NO_ROOM, errno.EIO)  # what fsync says of data that did not arrive


# Files --------------------------------------------------------------------------------------------


def write_atomically(
    path: str | os.PathLike[str], payload: bytes, *, keep_previous: bool = False
) -> None:
    """Write `payload` to `path`; a crash leaves the old file or the new one, never half of one."""
    with replacing(path, keep_previous=keep_previous, size=len(payload)) as temporary:
        temporary.write_bytes(payload)


@contextmanager
def replacing(
    path: str | os.PathLike[str], *, keep_previous: bool = False, size: int = 0
) -> Iterator[Path]:
    """Yield a temporary file to write; it replaces `path` when the block is left.

    A crash leaves the old file or the new one, never half of one. An exception in the block leaves
    the old file untouched. With `keep_previous`, the old file stays as `<path>.previous`.

    NoRoomError if the disk has not `size` bytes left, or fills up.
    """
    path = Path(path)
    with _partial(path.parent, size) as partial:
        temporary = partial / _NEW / path.name
        temporary.touch()
        yield temporary
        # flushed before the rename: otherwise a power cut could leave the new name on empty data
        _sync_file(temporary)
        if keep_previous and path.exists():
            # a second name for the current file, so that `path` exists at every moment
            previous(path).unlink(missing_ok=True)
            try:
                os.link(path, previous(path))
            except OSError:  # some network file systems have no hard links
                os.replace(path, previous(path))
        temporary.replace(path)
        _sync_folder(path.parent)


def previous(path: str | os.PathLike[str]) -> Path:
    """The path under which `replacing(keep_previous=True)` keeps the old file."""
    return Path(f"{os.fspath(path)}.previous")


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk, or a user's quota on it, is full."""
    # safetensors and torch's archives have no number
    signs = r"os error (28|122)\b|PytorchStreamWriter failed|unexpected pos \d|: iostream error"
    return getattr(error, "errno", None) in _NO_ROOM or re.search(signs, str(error)) is not None


@contextmanager
def room_for(size: int, place: Path) -> Iterator[None]:
    """Raise NoRoomError if the disk of `place` lacks room for `size` bytes, or fills up."""
    advice = "Free some space, or choose a place on another disk."
    free = _free_bytes(place)
    if free < size:
        raise NoRoomError(
            f"{size / 1e6:,.1f} MB are to be written, but the disk of {place} has "
            f"{free / 1e6:,.1f} MB left. {advice}"
        )
    try:
        yield
    except Exception as error:
        # numpy's errors have no number
        empty = isinstance(error, OSError) and _free_bytes(place) <= 2**20
        if isinstance(error, NoRoomError) or not (empty or is_full(error)):
            raise
        raise NoRoomError(
            f"the disk of {place} filled up; what was written is removed. {advice}"
        ) from error


def _free_bytes(place: Path) -> float:
    """Return how much a disk can still take; infinity where it gives no figure."""
    with suppress(OSError):
        usage = shutil.disk_usage(place)
        if usage.total > 0:
            return usage.free
    return math.inf


# Folders ------------------------------------------------------------------------------------------


@contextmanager
def replacing_folder(folder: Path, *, size: int = 0) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces `folder` when the block is left.

    On Linux the two are exchanged in one step. Elsewhere, and on file systems that cannot, there is
    a moment between two renames without a folder; if the process is killed then, the next write or
    load puts the old one back. The caller makes sure that the contents of `folder` may be deleted.
    Links are not followed. After an exception the old folder is untouched. `size` is as for
    `replacing`.
    """
    with _partial(folder.parent, size) as partial:
        temporary = partial / _NEW / folder.name
        temporary.mkdir()
        yield temporary
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                # the permissions follow the umask, as those of the folder do; safetensors sets 0600
                with suppress(OSError):  # some file systems have none
                    path.chmod(stat.S_IMODE(temporary.stat().st_mode) & 0o666)
                _sync_file(path)
        _sync_folder(temporary)
        _put_in_place(temporary, folder, partial / _OLD / folder.name)
        _sync_folder(folder.parent)


def _put_in_place(temporary: Path, folder: Path, aside: Path) -> None:
    """Rename a folder into place; an old one ends up in a place that will be removed."""
    if not folder.exists():
        temporary.rename(folder)
    elif not _exchange(temporary, folder):
        aside.parent.mkdir()
        folder.rename(aside)
        try:
            temporary.rename(folder)
        except BaseException:
            aside.rename(folder)
            raise
        aside.rename(temporary)  # not to be put back any more


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return swap is not None and (
        swap(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
    )


# Partial folders ----------------------------------------------------------------------------------


@contextmanager
def scratch(parent: Path | None = None, size: int = 0) -> Iterator[Path]:
    """Yield an empty folder in `parent`, or where temporary files are, and remove it on leaving."""
    with _partial(parent or Path(tempfile.gettempdir()), size) as partial:
        yield partial / _NEW


@contextmanager
def _partial(parent: Path, size: int) -> Iterator[Path]:
    """Make a hidden, locked folder in `parent`, and so on its disk; remove it on leaving."""
    parent.mkdir(parents=True, exist_ok=True)
    clean(parent)
    with room_for(size, parent):
        partial, lock = _locked_folder(parent)
        try:
            (partial / _NEW).mkdir()
            yield partial
        finally:  # also after Ctrl-C; with the old folder, if it was replaced
            _remove(partial)
            os.close(lock)


def clean(folder: str | os.PathLike[str]) -> None:
    """Remove what this user's killed processes left in a folder; what running ones write stays.

    A folder that was moved aside is put back if nothing has its name. Anybody may have made what
    looks like a leftover, in a shared folder or a download, so no link is followed.
    """
    for partial in _own_folders(Path(folder), PARTIAL):
        with suppress(OSError):  # another process removes it too, or it is not ours to remove
            _clean(partial)


def _own_folders(place: Path, names: str) -> list[Path]:
    """Return the folders of this user in a place by a pattern of their names; a link is none."""
    found = []
    for path in place.glob(names):
        with suppress(FileNotFoundError):  # another process removed it
            entry = path.lstat()
            if stat.S_ISDIR(entry.st_mode) and entry.st_uid == os.geteuid():
                found.append(path)
    return found


def _clean(partial: Path) -> None:
    try:
        handle = os.open(partial / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # killed right at the start, or right at the end
        partial.rmdir()
        return
    try:
        if not _lock(handle, wait=False):
            return
        for aside in _own_folders(partial, _OLD):
            for old in _own_folders(aside, "*"):
                if not os.path.lexists(partial.parent / old.name):
                    old.rename(partial.parent / old.name)
        _remove(partial)
    finally:
        os.close(handle)


def _remove(partial: Path) -> None:
    """Remove a partial folder, its lock last: killed in between, the rest is still known as one."""
    for part in (_NEW, _OLD):
        shutil.rmtree(partial / part, ignore_errors=True)
    with suppress(OSError):  # it holds something else, which is not ours
        (partial / _LOCK).unlink()
        partial.rmdir()


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """Make a partial folder; return it and its lock, which holds where files can be locked."""
    while True:
        path = parent / f".cocurve-{secrets.token_hex(4)}.partial"
        path.mkdir()
        # before it is locked, another process may take it for a leftover and remove it
        with suppress(FileNotFoundError):
            handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            _lock(handle, wait=True)
            if (path / _LOCK).exists():
                return path, handle


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file until it is closed or the process ends; False if that cannot be done."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another process, or a file system without locks
        return False
    return True


def _sync_file(path: Path, flags: int = os.O_RDWR) -> None:
    """Make the contents of a file survive a power cut, if the system can."""
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in _LOST:
            raise
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, if the system can sync a folder."""
    with suppress(OSError):
        _sync_file(folder, os.O_RDONLY)
