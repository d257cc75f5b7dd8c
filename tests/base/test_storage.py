"""Stored files: sealed, checked before they are believed, and read without running them."""

from __future__ import annotations

import copy
import copyreg
import io
import json
import os
import pickle
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cocurve_lab.base.errors import FileFormatError
from cocurve_lab.base.storage import dump_plain, fingerprint, load_npz, load_plain, seal_of
from cocurve_lab.curvature.matrix import Curvature
from helpers.problems import make_units, random_curvature

FORMAT = {"format": "test", "version": 1}


def load(path: Path) -> dict[str, Any]:
    return load_plain(path, format_name="test", version=1)


def sealed(body: bytes) -> bytes:
    return body + seal_of(body)


def load_archive(path: Path) -> None:
    """Seal an archive of numpy as `dump_npz` does, and read it."""
    size = len(seal_of(b""))
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = bytes(size)
    path.write_bytes(sealed(path.read_bytes()[:-size]))
    load_npz(path, format_name="test", version=1)


def test_plain_values_and_arrays_come_back(tmp_path: Path) -> None:
    value = FORMAT | {
        "numbers": [1, 2.5, None, True, "x", b"\x00"],
        "nested": {"tuple": (1, 2), "scalar": np.float32(0.5)},
        "arrays": [
            np.arange(6, dtype=kind).reshape(2, 3) for kind in ("float64", "float32", "int64")
        ],
        "empty": np.zeros((0, 3)),
        "strided": np.arange(6.0).reshape(2, 3).T,
        "flags": np.array([True, False]),
    }
    (tmp_path / "a").write_bytes(dump_plain(value))
    again = load(tmp_path / "a")
    assert again["numbers"] == value["numbers"]
    assert again["nested"] == {"tuple": [1, 2], "scalar": 0.5}
    for mine, theirs in zip(
        [*value["arrays"], value["empty"], value["strided"], value["flags"]],
        [*again["arrays"], again["empty"], again["strided"], again["flags"]],
        strict=True,
    ):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
        assert theirs.flags.writeable


@pytest.mark.parametrize("value", [object(), np.array([object()]), {1, 2}, np.array(["text"])])
def test_what_is_not_plain_is_not_stored(value: Any) -> None:
    with pytest.raises(TypeError):
        dump_plain({"value": value})


# Hostile files ------------------------------------------------------------------------------------


class _Run:
    """Unpickles by calling `os.system`, the classic."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


class _Outside(pickle.Pickler):
    """Refers to the string "outside" by a persistent id."""

    def persistent_id(self, obj: Any) -> Any:
        return 7 if obj == "outside" else None


def hostile_files(command: str) -> dict[str, bytes]:
    buffer = io.BytesIO()
    _Outside(buffer, protocol=4).dump(FORMAT | {"nested": [{"deep": "outside"}]})
    text = command.encode()
    files = {f"reduce, protocol {p}": pickle.dumps(_Run(command), p) for p in range(6)}
    return files | {
        "nested in a good file": pickle.dumps(FORMAT | {"matrix": [_Run(command)]}, 4),
        "GLOBAL": b"cos\nsystem\n(S'" + text + b"'\ntR.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c"
        + bytes([len(text)]) + text + b"\x85R.",
        "INST": b"(S'" + text + b"'\nios\nsystem\n.",
        "an extension code": b"\x80\x02\x82\xf0X" + len(text).to_bytes(4, "little") + text
        + b"\x85R.",
        "eval": b"cbuiltins\neval\n(S'__import__(\"os\").system(\"" + text + b"\")'\ntR.",
        "numpy's own reconstruct": pickle.dumps(FORMAT | {"matrix": np.eye(2)}, 4),
        "persistent id": buffer.getvalue(),
        "a plain class": pickle.dumps(Path("x"), 4),
    }  # fmt: skip


def claimed(dtype: Any) -> bytes:
    """A file with an array that claims to be of a dtype."""
    array = {"__array__": dtype, "shape": [1], "data": bytes(8)}
    return pickle.dumps(FORMAT | {"x": array})


BROKEN = {
    **{f"dtype {dtype}": claimed(dtype) for dtype in ("|O", "|V8", "<U4", "no", "<f8,<f8", 3)},
    "empty": b"",
    "text": b"not a pickle",
    "huge shape": pickle.dumps(
        FORMAT | {"x": {"__array__": "<f8", "shape": [10**12], "data": b""}}
    ),
    "no data": pickle.dumps(FORMAT | {"x": {"__array__": "<f8"}}),
    "deeper than the recursion limit": b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",
    "claims 2^63 bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",
    "a list": pickle.dumps([1, 2]),
    "another format": pickle.dumps({"format": "cake", "version": 1}),
    "another version": pickle.dumps({"format": "test", "version": 2}),
    "no format": pickle.dumps({"version": 1}),
}  # fmt: skip
BOMBS = {
    "room for 2^28 values": b"\x80\x04}r\x00\x00\x00\x10.",
    "room for 2^27 values by text": b"(dp134217728\n.",
    "lists in lists, each twice": b"\x80\x04]\x94" + b"".join(
        b"]\x94(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(60)) + b".",
    "one text of bytes many times": b"\x80\x04]\x94(B" + (1000).to_bytes(4, "little") + bytes(1000)
    + b"\x94" + b"h\x01" * 1000 + b"e.",
    "something after its end": pickle.dumps(FORMAT, 4) + b"x",
}  # fmt: skip


@pytest.mark.parametrize("name", [*BROKEN, *BOMBS, *hostile_files("x")])
def test_a_hostile_file_is_refused_before_it_runs_or_grows(name: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "ran", tmp_path / "hostile.pkl"
    payload = (BROKEN | BOMBS | hostile_files(f"touch {marker}"))[name]
    if name.startswith("reduce"):
        pickle.loads(payload)  # the attack is real: plain pickle runs it
        marker.unlink()
    path.write_bytes(sealed(payload))
    copyreg.add_extension("os", "system", 0xF0)
    if name in BOMBS:
        tracemalloc.start()
    try:
        for reader in (load, Curvature.load):
            with pytest.raises(FileFormatError):
                reader(path)
        assert tracemalloc.get_traced_memory()[1] < 4e6  # 0 where nothing is traced
    finally:
        tracemalloc.stop()
        copyreg.remove_extension("os", "system", 0xF0)
    assert not marker.exists()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = dump_plain(FORMAT | {"x": np.arange(5.0), "y": "text"})
    for length in range(len(whole)):  # one of them has no seal
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(FileFormatError):
            load(tmp_path / "cut")
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


# Seals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pkl", ".npz"])
def test_a_changed_bit_anywhere_is_noticed(tmp_path: Path, suffix: str) -> None:
    path = random_curvature(make_units(), groups=4).save(tmp_path / f"H{suffix}")
    whole = path.read_bytes()
    for place in {*range(0, len(whole), 97), *range(len(whole) - 100, len(whole))}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(FileFormatError):
            Curvature.load(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(FileFormatError):
        Curvature.load(path)


def test_without_this_library_a_file_is_a_plain_pickle_or_npz(tmp_path: Path) -> None:
    curvature = random_curvature(make_units(), groups=4)
    plain = pickle.loads(curvature.save(tmp_path / "H.pkl").read_bytes())
    assert plain["units"] == curvature.units.to_plain()
    matrix = np.frombuffer(plain["matrix"]["data"]).reshape(plain["matrix"]["shape"])
    np.testing.assert_array_equal(matrix, curvature.matrix)
    with np.load(curvature.save(tmp_path / "H.npz")) as archive:
        np.testing.assert_array_equal(archive["matrix"], curvature.matrix)


# Archives -----------------------------------------------------------------------------------------


HEADER = np.frombuffer(json.dumps(FORMAT).encode(), np.uint8)


def many_names(path: Path) -> None:
    """One array, named by a hundred entries of the directory."""
    np.savez(path, header=HEADER, zeros=np.zeros(1000))
    with zipfile.ZipFile(path, "a") as archive:
        (member,) = (item for item in archive.infolist() if item.filename == "zeros.npy")
        for number in range(100):
            twin = copy.copy(member)
            twin.filename = f"zeros{number}.npy"
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
        archive._didModify = True  # type: ignore[attr-defined]


def promising(path: Path) -> None:
    """A header that promises more than its bytes."""
    header, zeros = io.BytesIO(), io.BytesIO()
    np.save(header, HEADER)
    np.save(zeros, np.zeros(1000))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.npy", header.getvalue())
        archive.writestr("x.npy", zeros.getvalue().replace(b"(1000,)", b"(9000,)"))


ARCHIVES: dict[str, Callable[[Path], Any]] = {
    "a bomb": lambda path: np.savez_compressed(path, header=HEADER, zeros=np.zeros(2_000_000)),
    "many names": many_names,
    "promises": promising,
    "complex": lambda path: np.savez(path, header=HEADER, x=np.eye(2) * 1j),
    "text": lambda path: np.savez(path, header=HEADER, x=np.array(["text"])),
    "objects": lambda path: np.savez(path, header=HEADER, x=np.array([object()])),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_refused(name: str, tmp_path: Path) -> None:
    ARCHIVES[name](tmp_path / "a.npz")
    with pytest.raises(FileFormatError):
        load_archive(tmp_path / "a.npz")


def test_fingerprints_tell_apart_what_bytes_alone_do_not() -> None:
    a = np.arange(6, dtype=np.int64)
    different: list[tuple[Any, ...]] = [
        (a,),
        (a.reshape(2, 3),),
        (a.astype(np.int32),),
        (a.tobytes(),),
        (a[:3], a[3:]),
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ({"a": 1},),
        (),
    ]
    marks = [fingerprint(*parts) for parts in different]
    assert len(set(marks)) == len(different)
    assert fingerprint(a.reshape(2, 3).T) == fingerprint(a.reshape(2, 3).T.copy())
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
