"""Stored containers: plain values and arrays in a pickle or an `.npz`, and a seal at the end.

Results are pickles, because notebooks expect a pickle beside them, but pickles of plain containers
only; an array is stored as bytes with its dtype and shape. A file ends with its seal: the length
and the SHA-256 of what is before. `pickle.load` and `np.load` ignore it. JSON has its checksum in
a field of its own.

File contents are validated before use, starting with the seal. A pickle is then walked, and refused
if it has an instruction that does more than make plain containers, or uses one of them twice: so it
can call nothing, and what it makes is not much larger than the file. An archive may hold only plain
arrays, uncompressed. The reader of each kind of file validates the values (schema.py).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .errors import FileFormatError, MismatchError
from .files import MOST_STORED, open_regular
from .schema import parse_json

_ARRAY = "__array__"  # marks the dict that stands for an array
_DTYPES = {"float64", "float32", "float16", "int64", "int32", "uint8", "bool"}
_SEAL = re.compile(rb"\nsha256 [0-9a-f]{64} length \d{16}\n")
SUM = "sha256"  # the field of a checksum in JSON
_SEAL_BYTES = len(b"\nsha256  length \n") + 64 + 16


# Fingerprints and settings ------------------------------------------------------------------------


def fingerprint(*parts: Any) -> str:
    """Return the SHA-256, as 64 hex digits, of arrays, bytes and values that JSON can express.

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
    """Raise MismatchError, naming what differs, unless the settings of a file have `expected`."""
    wrong = [key for key, value in expected.items() if found.get(key) != value]
    if wrong:
        details = "; ".join(f"{key} is {found.get(key)!r}, not {expected[key]!r}" for key in wrong)
        raise MismatchError(
            f"{what} was made with other settings: {details}. Use those settings, or another file."
        )


# Seals --------------------------------------------------------------------------------------------


def seal_of(body: bytes) -> bytes:
    """Return the seal of a file's contents; it is at their end, and as long for every file."""
    return b"\nsha256 %s length %016d\n" % (hashlib.sha256(body).hexdigest().encode(), len(body))


def seal_json(content: dict[str, Any]) -> dict[str, Any]:
    """Return an object for JSON with the checksum of its values, which `unseal_json` compares."""
    return content | {SUM: fingerprint(json.loads(json.dumps(content)))}


def unseal_json(content: Any, remedy: str) -> None:
    """Take the checksum off an object read from JSON; FileFormatError if it is not the right one.

    The message is the fact and `remedy`, a next step without a full stop.
    """
    if not isinstance(content, dict) or SUM not in content:
        raise FileFormatError(f"it has no checksum ({SUM}), so this library did not write it")
    try:
        right = content.pop(SUM) == fingerprint(content)
    except RecursionError:  # nested too deeply to be one of ours
        right = False
    if not right:
        fact = "it does not match its checksum: it was damaged or changed after it was written"
        raise FileFormatError(f"{fact}. {remedy}")


def _read(
    source: str | os.PathLike[str],
    parse: Callable[[bytes], Any],
    format_name: str,
    version: int,
    others: Collection[str],
) -> dict[str, Any]:
    """Read a file, check its seal, parse it, and check its format and version."""
    path = Path(source)
    with open_regular(path, MOST_STORED) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _SEAL_BYTES))
        end = file.read()
        file.seek(0)
        sealed = _SEAL.fullmatch(end) is not None  # before the rest is read
        body = file.read(size - _SEAL_BYTES) if sealed else b""
    remedy = f"Use a copy, or {path.name}.previous if it exists; otherwise build again."
    if not sealed:
        raise FileFormatError(
            f"{path} does not end with a checksum: it is truncated, or not a file of cocurve-lab. "
            f"Check the path. {remedy}"
        )
    if seal_of(body) != end:
        raise FileFormatError(
            f"{path} does not match its checksum: it was damaged or changed after it was written. "
            + remedy
        )
    try:
        value = parse(body)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from None
    except Exception as error:  # a broken pickle or archive can raise nearly anything
        raise FileFormatError(
            f"{path} cannot be read ({type(error).__name__}: {error}). Check the path. {remedy}"
        ) from None
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if found != format_name and found not in others:
        raise FileFormatError(f"{path} holds {found!r}, not {format_name!r}. Check the path.")
    if value.get("version") != version:
        raise FileFormatError(
            f"{path} has {found} version {value.get('version')!r}; this code reads version "
            f"{version}. Build again, or read it with the release that wrote it."
        )
    return dict(value)


# Pickles of plain containers ----------------------------------------------------------------------

# what protocol 4 needs for None, bools, numbers, text, bytes, lists and dicts; MEMOIZE numbers its
# entries by itself, where PUT may ask for room for billions
_INSTRUCTIONS = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE",
    "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE",
    "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "EMPTY_LIST", "APPEND",
    "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
}  # fmt: skip
_MOST_INSTRUCTIONS = 20_000_000  # each may make an object of some fifty bytes


def dump_plain(value: dict[str, Any]) -> bytes:
    """Pickle a dict of plain containers and numpy arrays in the form that `load_plain` reads."""
    body = pickle.dumps(_encode(value), protocol=4)
    return body + seal_of(body)


def load_plain(
    path: str | os.PathLike[str], *, format_name: str, version: int, others: Collection[str] = ()
) -> dict[str, Any]:
    """Read what `dump_plain` wrote, and check its version; run no code of the file.

    Its format is `format_name`, or one of the others.
    """
    return _read(path, _unpickle, format_name, version, others)


def _unpickle(body: bytes) -> Any:
    _require_plain(body)
    return _decode(_PlainUnpickler(io.BytesIO(body)).load())


def _require_plain(body: bytes) -> None:
    """Raise FileFormatError unless a pickle only makes plain values, each of them once."""
    reusable: list[bool] = []  # whether an entry of the memo may be used again
    before, last = False, 0
    argument: Any
    for number, (opcode, argument, place) in enumerate(pickletools.genops(body)):
        last = place or 0
        if opcode.name not in _INSTRUCTIONS:
            raise FileFormatError(
                f"its pickle has the instruction {opcode.name} at byte {place}, which a file of "
                "cocurve-lab never has. Nothing was run. Do not trust the source of this file."
            )
        if number == _MOST_INSTRUCTIONS:
            raise FileFormatError(
                f"its pickle has more than {_MOST_INSTRUCTIONS:,} instructions, which no file of "
                "cocurve-lab has. Check the path."
            )
        if opcode.name == "MEMOIZE":
            reusable.append(before)
        elif "BINGET" in opcode.name and not (argument < len(reusable) and reusable[argument]):
            # 250 bytes of lists that hold each other twice stand for more than any memory holds
            raise FileFormatError(
                f"its pickle uses a value twice at byte {place}, which a file of cocurve-lab never "
                "does. Check the path."
            )
        # text is shared, not copied; Python itself shares bytes up to one
        before = "UNICODE" in opcode.name or ("BYTES" in opcode.name and len(argument) < 2)
    if last + 1 != len(body):
        raise FileFormatError(
            f"{len(body) - last - 1:,} bytes follow its end: it is damaged. Check the path."
        )


class _PlainUnpickler(pickle.Unpickler):
    """A second lock: an unpickler that finds no class and no function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise FileFormatError(f"it asks to import {module_name}.{global_name}. Do not trust it.")


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
    shape, data = value.get("shape"), value.get("data")
    if not (
        isinstance(shape, list)
        and all(type(size) is int and size >= 0 for size in shape)
        and isinstance(data, bytes)
    ):
        raise FileFormatError(f"an array has shape {str(shape)[:60]}. Check the path.")
    dtype = _stored_dtype(value[_ARRAY], shape, len(data))
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def _stored_dtype(claim: Any, shape: Sequence[int], size: int) -> np.dtype[Any]:
    """Return the dtype of an array of `size` bytes; FileFormatError unless it is ours and fits."""
    dtype = np.dtype(claim) if isinstance(claim, (str, np.dtype)) else None
    if dtype is None or dtype.name not in _DTYPES or math.prod(shape) * dtype.itemsize != size:
        raise FileFormatError(
            f"an array claims dtype {claim!r} and shape {str(shape)[:60]}, which {size:,} bytes of "
            "a file of cocurve-lab never hold. Check the path."
        )
    return dtype


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
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = bytes(_SEAL_BYTES)  # the last bytes of a zip file are its comment
    body = buffer.getvalue()[:-_SEAL_BYTES]
    return body + seal_of(body)


def load_npz(
    path: str | os.PathLike[str], *, format_name: str, version: int, others: Collection[str] = ()
) -> dict[str, Any]:
    """Read what `dump_npz` wrote, as `load_plain`; run no code of the file."""
    return _read(path, _unpack, format_name, version, others)


def _unpack(body: bytes) -> dict[str, Any]:
    whole = body + bytes(_SEAL_BYTES)  # without its comment the archive would end too early
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > len(whole) or any(
            member.compress_type != zipfile.ZIP_STORED for member in members
        ):
            raise FileFormatError(
                "its arrays are compressed or overlap, which those of cocurve-lab never do. Check "
                "the path."
            )
        value = {
            member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members
        }
    header = parse_json(value.pop("header").tobytes())
    if not isinstance(header, dict) or len(value) + 1 != len(members):
        raise FileFormatError("its header or its list of arrays is damaged. Check the path.")
    return value | header


def _array(data: bytes) -> np.ndarray:
    """Return the array of a member, whose header must not promise more than its bytes."""
    file = io.BytesIO(data)
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    _stored_dtype(dtype, shape, len(data) - file.tell())
    file.seek(0)
    array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array
