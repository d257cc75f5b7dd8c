"""Safe files: written as a whole or not at all, and read without running any code.

Results are pickles, because notebooks expect a pickle beside them, but pickles of plain containers
only. An array is stored as bytes with its dtype and shape. The reader allows no global name at all,
so a hostile file has nothing to call.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import pickle
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FileFormatError, MismatchError

log = logging.getLogger(__name__)
_ARRAY = "__array__"  # marks the dict that stands for an array
_DTYPES = {"float64", "float32", "float16", "int64", "int32", "uint8", "bool"}
# a full disk, or a user's quota where the system knows one
_NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


# Fingerprints and settings ------------------------------------------------------------------------


def fingerprint(*parts: Any) -> str:
    """SHA-256, as 64 hex digits, of arrays, bytes and values that JSON can express.

    The length of each part is hashed too, so that parts cannot run into each other.
    """
    digest = hashlib.sha256()
    payload: bytes | memoryview
    for part in parts:
        if isinstance(part, np.ndarray):
            # dtype and shape are hashed too: the same bytes can mean different arrays
            digest.update(f"{part.dtype.str}{part.shape}:".encode())
            payload = np.ascontiguousarray(part).data  # not copied: weights can be gigabytes
        elif isinstance(part, bytes):
            payload = part
        else:
            payload = json.dumps(part, sort_keys=True, separators=(",", ":")).encode()
        digest.update(f"{memoryview(payload).nbytes}:".encode())
        digest.update(payload)
    return digest.hexdigest()


def require_settings(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Raise MismatchError, naming every field that differs, unless `found` has all of `expected`.

    Args:
        found: settings of a file.
        expected: settings it must have; others do not matter.
        what: the file, as the message names it.
    """
    wrong = [key for key, value in expected.items() if found.get(key) != value]
    if wrong:
        details = "; ".join(f"{key} is {found.get(key)!r}, not {expected[key]!r}" for key in wrong)
        raise MismatchError(
            f"{what} was made with other settings: {details}. Use those settings, or another file."
        )


# Writing: all or nothing --------------------------------------------------------------------------


def write_atomically(
    path: str | os.PathLike[str], payload: bytes, *, keep_previous: bool = False
) -> None:
    """Write `payload` to `path`; a crash leaves the old file or the new one, never half of one.

    Raises: as `replacing`.
    """
    with replacing(path, keep_previous=keep_previous) as temporary:
        temporary.write_bytes(payload)


@contextmanager
def replacing(path: str | os.PathLike[str], *, keep_previous: bool = False) -> Iterator[Path]:
    """Yield a temporary file to write; it replaces `path` when the block is left.

    A crash leaves the old file or the new one, never half of one. An exception in the block leaves
    the old file untouched. With `keep_previous`, the old file stays as `<path>.previous`.

    Raises:
        OSError: the disk is full or the folder is not writable. The old file is untouched, and the
            temporary one is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, because a rename is atomic only within one file system
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # flushed before the rename: otherwise a power cut could leave the new name on empty data
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes 0600, which hides results from a group
        if keep_previous and path.exists():
            _keep_as_previous(path)
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:  # Ctrl-C too
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; it replaces `folder` when the block is left.

    The caller makes sure that the contents of `folder` may be deleted. Links are not followed.

    Raises:
        OSError: the folder cannot be written. After this, as after an exception in the block, the
            old folder is untouched, and the temporary one is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(folder)
    try:
        yield temporary
        _open_to_others(temporary)
        _put_in_place(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _beside(folder: Path) -> Path:
    """Make a hidden folder in the same place, and so on the same disk."""
    # not with mkdtemp, whose folders are closed to the group
    path = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    path.mkdir()
    return path


def _open_to_others(folder: Path) -> None:
    """Give files the permissions of their folder, which follow the umask; safetensors sets 0600."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(stat.S_IMODE(folder.stat().st_mode) & 0o666)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a folder into place; the old one is set aside first, and restored on failure."""
    if not folder.exists():
        temporary.rename(folder)
        return
    # a folder with contents cannot be renamed over, so for a moment there is none
    old = _beside(folder)
    aside = old / folder.name
    try:
        folder.rename(aside)
        temporary.rename(folder)
    except BaseException:
        if aside.exists() and temporary.exists():
            aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, if the system can sync a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        return
    try:
        os.fsync(handle)
    except OSError:
        log.debug("%s cannot be synced", folder)
    finally:
        os.close(handle)


def _keep_as_previous(path: Path) -> None:
    """Give the current file a second name, so that `path` exists at every moment."""
    previous(path).unlink(missing_ok=True)
    try:
        os.link(path, previous(path))
    except OSError:  # some network file systems have no hard links
        os.replace(path, previous(path))


def previous(path: str | os.PathLike[str]) -> Path:
    """The path under which `replacing(keep_previous=True)` keeps the old file."""
    return Path(f"{os.fspath(path)}.previous")


def is_full(error: BaseException) -> bool:
    """Whether an error means that a disk, or a user's quota on it, is full."""
    return getattr(error, "errno", None) in _NO_ROOM


def _umask() -> int:
    """The umask of the process; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


# Pickles of plain containers ----------------------------------------------------------------------


def dump_plain(value: dict[str, Any]) -> bytes:
    """Pickle a dict of plain containers and numpy arrays in the form that `load_plain` reads.

    Raises:
        TypeError: it holds another kind of value, or an array of another dtype than `_DTYPES`.
    """
    return pickle.dumps(_encode(value), protocol=4)


def load_plain(path: str | os.PathLike[str], *, format_name: str, version: int) -> dict[str, Any]:
    """Read what `dump_plain` wrote, and check its format and version; run no code of the file.

    Raises:
        FileNotFoundError: there is no such file.
        FileFormatError: the file is truncated, names a global, or has another format or version.
    """
    path = Path(path)
    payload = path.read_bytes()
    try:
        value = _decode(_PlainUnpickler(io.BytesIO(payload)).load())
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from None
    except Exception as error:  # a broken pickle can raise nearly anything
        raise FileFormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is truncated, or not a "
            "file of cocurve-lab. Check the path; if it is right, build again, or use "
            f"{previous(path).name} if it exists."
        ) from None
    _require_format(value, path, format_name, version)
    return value


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that finds no class and no function, so that a file can call nothing."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise FileFormatError(
            f"the file asks to import {module_name}.{global_name}, which a file of cocurve-lab "
            "never does. Nothing was run. Do not trust the source of this file."
        )

    def persistent_load(self, pid: Any) -> Any:
        raise FileFormatError(
            "the file refers to an outside object, which a file of cocurve-lab never does. Nothing "
            "was run. Do not trust the source of this file."
        )


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.name not in _DTYPES:
            raise TypeError(
                f"an array of dtype {value.dtype} cannot be stored. Convert it to one of "
                f"{', '.join(sorted(_DTYPES))}."
            )
        data = np.ascontiguousarray(value)
        return {_ARRAY: data.dtype.str, "shape": list(data.shape), "data": data.tobytes()}
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    for plain in (int, float, str):  # reading a subclass, such as TorchVersion, needs an import
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(
        f"a {type(value).__name__} cannot be stored. Convert it to plain containers or an array."
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY not in value:
        return {key: _decode(item) for key, item in value.items()}
    dtype = np.dtype(value[_ARRAY])
    if dtype.name not in _DTYPES:
        raise FileFormatError(
            f"an array claims dtype {value[_ARRAY]!r}, which a file of cocurve-lab never holds. "
            "Check the path."
        )
    return np.frombuffer(value["data"], dtype=dtype).reshape(value["shape"]).copy()


# Archives of arrays -------------------------------------------------------------------------------


def dump_npz(value: dict[str, Any]) -> bytes:
    """Pack a dict of numpy arrays and other values into an `.npz`; the others become a header.

    Numpy alone can read it. Values other than arrays must be expressible in JSON.
    """
    arrays: dict[str, Any] = {
        name: item for name, item in value.items() if isinstance(item, np.ndarray)
    }
    header = {name: item for name, item in value.items() if name not in arrays}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def load_npz(path: str | os.PathLike[str], *, format_name: str, version: int) -> dict[str, Any]:
    """Read what `dump_npz` wrote, and check its format and version; run no code of the file.

    Raises: as `load_plain`.
    """
    path = Path(path)
    try:
        # opened here, because np.load does not close a truncated archive
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            value: dict[str, Any] = {
                name: archive[name] for name in archive.files if name != "header"
            }
            value |= json.loads(archive["header"].tobytes())
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, numpy and json each have their own
        raise FileFormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is truncated, or not a "
            "file of cocurve-lab. Check the path; if it is right, build again."
        ) from None
    _require_format(value, path, format_name, version)
    return value


def _require_format(value: Any, path: Path, format_name: str, version: int) -> None:
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if found != format_name:
        raise FileFormatError(f"{path} holds {found!r}, not {format_name!r}. Check the path.")
    if value.get("version") != version:
        raise FileFormatError(
            f"{path} has {format_name} version {value.get('version')!r}; this code reads version "
            f"{version}. Build again, or read it with the release that wrote it."
        )
