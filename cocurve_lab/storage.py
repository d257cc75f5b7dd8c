"""Files that can be trusted: written whole or not at all, and read without running anything.

Results are pickles because notebooks expect a pickle next to them, but only of plain containers:
numpy arrays travel as their bytes with dtype and shape, and the reader allows no global at all, so
a hostile file can name nothing to call.
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
_ARRAY = "__array__"
_DTYPES = {"float64", "float32", "float16", "int64", "int32", "uint8", "bool"}
_NO_ROOM = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))


def fingerprint(*parts: Any) -> str:
    """SHA-256 (64 hex digits) of arrays, bytes and JSON-able values, each with its length."""
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


def write_atomically(
    path: str | os.PathLike[str], payload: bytes, *, keep_previous: bool = False
) -> None:
    """Write `payload` to `path` so that a crash leaves the old file or the new one, never half.

    Raises: as `replacing`.
    """
    with replacing(path, keep_previous=keep_previous) as temporary:
        temporary.write_bytes(payload)


@contextmanager
def replacing(path: str | os.PathLike[str], *, keep_previous: bool = False) -> Iterator[Path]:
    """A temporary file to write inside the block; it takes the place of `path` once that is done.

    It lies in the same folder, is flushed to disk, and is renamed over `path`: a crash leaves the
    old file or the new one, never half. With `keep_previous` the old file stays beside it as
    `<path>.previous`. An exception in the block leaves the old file untouched.

    Raises:
        OSError: the disk is full or the folder is not writable; the old file is untouched and the
            temporary one removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes 0600, hiding results from a group
        if keep_previous and path.exists():
            _keep_as_previous(path)
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A new folder to fill inside the block; it takes the place of `folder` once that is done.

    Whoever calls has made sure that what is in `folder` may go. Links are not followed.

    Raises:
        OSError: the folder cannot be written. After this or an exception in the block, what was
            there is still there and the new folder is removed.
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
    """A new hidden folder on the same disk; not mkdtemp, whose folders are for one user alone."""
    path = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    path.mkdir()
    return path


def _open_to_others(folder: Path) -> None:
    """Give files the permissions of the umask, as the folder has them: weights come as 0600."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(stat.S_IMODE(folder.stat().st_mode) & 0o666)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename into place; what was there is set aside, and comes back if that fails."""
    if not folder.exists():
        temporary.rename(folder)
        return
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
    """Make a rename survive a power cut, where the system lets a folder be synced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        log.debug("%s cannot be synced", folder)
    finally:
        os.close(handle)


def _keep_as_previous(path: Path) -> None:
    """Give the present file a second name, so that `path` exists at every moment."""
    previous(path).unlink(missing_ok=True)
    try:
        os.link(path, previous(path))
    except OSError:  # some network file systems have no hard links
        os.replace(path, previous(path))


def previous(path: str | os.PathLike[str]) -> Path:
    """Where `replacing(keep_previous=True)` leaves the file it replaced."""
    return Path(f"{os.fspath(path)}.previous")


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or a user's share of it, is full."""
    return getattr(error, "errno", None) in _NO_ROOM


def dump_plain(value: dict[str, Any]) -> bytes:
    """Pickle a dict of plain containers and numpy arrays so that `load_plain` can read it."""
    return pickle.dumps(_encode(value), protocol=4)


def load_plain(path: str | os.PathLike[str], *, format_name: str, version: int) -> dict[str, Any]:
    """Read what `dump_plain` wrote, checking `format` and `version`; runs nothing from the file.

    Raises:
        FileNotFoundError: there is no such file.
        FileFormatError: the file is truncated, names a global, or holds another format or version.
    """
    path = Path(path)
    payload = path.read_bytes()
    try:
        value = _decode(_PlainUnpickler(io.BytesIO(payload)).load())
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from None
    except Exception as error:  # a broken pickle can raise nearly anything
        raise FileFormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}): it is truncated or not one "
            "of our files. Check the path; else build again, or use its .previous if there is one."
        ) from None
    _require_format(value, path, format_name, version)
    return value


def dump_npz(value: dict[str, Any]) -> bytes:
    """A dict of numpy arrays and JSON-able values as an `.npz` archive; the rest is its header."""
    arrays: dict[str, Any] = {
        name: item for name, item in value.items() if isinstance(item, np.ndarray)
    }
    header = {name: item for name, item in value.items() if name not in arrays}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def load_npz(path: str | os.PathLike[str], *, format_name: str, version: int) -> dict[str, Any]:
    """Read what `dump_npz` wrote, checking `format` and `version`; runs nothing from the file.

    Raises: as `load_plain`.
    """
    path = Path(path)
    try:
        # opened here, because np.load leaves a truncated archive open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            value: dict[str, Any] = {
                name: archive[name] for name in archive.files if name != "header"
            }
            value |= json.loads(archive["header"].tobytes())
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, numpy and json each have their own
        raise FileFormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}): truncated, or not ours. "
            "Build it again."
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
            f"{version}. Build it again, or read it with the release that wrote it."
        )


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler for which no class or function exists."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise FileFormatError(
            f"the file asks to import {module_name}.{global_name}, which our files never do. "
            "Nothing was run; do not trust its source."
        )

    def persistent_load(self, pid: Any) -> Any:
        raise FileFormatError("the file refers to an outside object, which our files never do.")


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.name not in _DTYPES:
            raise TypeError(f"arrays of dtype {value.dtype} are not storable")
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
    for plain in (int, float, str):  # subclasses (TorchVersion, say) would need an import
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"{type(value).__name__} is not a plain value")


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
            f"an array claims dtype {value[_ARRAY]!r}, which our files never hold."
        )
    return np.frombuffer(value["data"], dtype=dtype).reshape(value["shape"]).copy()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def require_settings(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Raise MismatchError naming every field of `expected` that `found` does not match."""
    wrong = [key for key, value in expected.items() if found.get(key) != value]
    if wrong:
        details = "; ".join(f"{key} is {found.get(key)!r}, not {expected[key]!r}" for key in wrong)
        raise MismatchError(
            f"{what} was made with other settings: {details}. Use those settings, or another file."
        )
