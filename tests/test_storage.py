"""Files: written whole or not at all, and read without running anything in them."""

from __future__ import annotations

import copyreg
import errno
import io
import os
import pickle
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cocurve_lab.atomic import previous, replacing, replacing_folder, write_atomically
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.errors import FileFormatError
from cocurve_lab.storage import dump_plain, fingerprint, load_plain
from helpers.problems import make_units, random_curvature

FORMAT = {"format": "test", "version": 1}


def load(path: Path) -> dict[str, Any]:
    return load_plain(path, format_name="test", version=1)


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


@pytest.mark.parametrize("name", sorted(hostile_files("x")))
def test_nothing_in_a_hostile_file_runs(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    payload = hostile_files(f"touch {marker}")[name]
    if name.startswith("reduce"):
        pickle.loads(payload)  # the attack is real: plain pickle runs it
        assert marker.exists()
        marker.unlink()
    path = tmp_path / "hostile.pkl"
    path.write_bytes(payload)
    copyreg.add_extension("os", "system", 0xF0)
    try:
        for reader in (load, Curvature.load):
            with pytest.raises(FileFormatError, match=r"hostile\.pkl"):
                reader(path)
    finally:
        copyreg.remove_extension("os", "system", 0xF0)
    assert not marker.exists()


@pytest.mark.parametrize("claim", ["|O", "|V8", "<U4", "nonsense", "<f8,<f8", 3])
def test_an_array_of_a_forbidden_dtype_is_refused(claim: Any, tmp_path: Path) -> None:
    array = {"__array__": claim, "shape": [1], "data": bytes(8)}
    (tmp_path / "a").write_bytes(pickle.dumps(FORMAT | {"x": array}))
    with pytest.raises(FileFormatError):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"not a pickle",
        pickle.dumps(FORMAT | {"x": {"__array__": "<f8", "shape": [10**12], "data": b""}}),
        pickle.dumps(FORMAT | {"x": {"__array__": "<f8"}}),
        b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",  # deeper than the recursion limit
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.",  # claims 2^63 bytes
    ],
    ids=["empty", "text", "huge shape", "no data", "deep", "huge string"],
)
def test_broken_files_are_named_not_crashed_on(payload: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(payload)
    with pytest.raises(FileFormatError, match="broken"):
        load(tmp_path / "broken")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = dump_plain(FORMAT | {"x": np.arange(5.0), "y": "text"})
    for length in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(FileFormatError):
            load(tmp_path / "cut")


def test_other_formats_and_versions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for value, message in (
        ({"format": "cake", "version": 1}, "holds 'cake', not 'test'"),
        ({"format": "test", "version": 2}, "version 2; this code reads version 1"),
        ({"version": 1}, "holds None"),
    ):
        path.write_bytes(dump_plain(value))
        with pytest.raises(FileFormatError, match=message):
            load(path)
    path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(FileFormatError, match="holds 'list'"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")


# Writing ------------------------------------------------------------------------------------------


def test_write_replaces_and_can_keep_the_previous(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert not previous(path).exists()
    write_atomically(path, b"three", keep_previous=True)
    assert (path.read_bytes(), previous(path).read_bytes()) == (b"three", b"two")
    assert sorted(path.parent.iterdir()) == [path, previous(path)]


def test_a_result_is_readable_by_the_group(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", b"x")
        assert os.umask(0o022) == 0o022  # looking at the mask leaves it alone
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


@pytest.mark.parametrize("keep_previous", [False, True])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_previous: bool
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new", keep_previous=keep_previous)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_write_that_really_fails_half_way(tmp_path: Path) -> None:
    """The kernel refuses the 4097th byte, as a full disk would."""
    path = tmp_path / "file"
    write_atomically(path, b"old")
    script = (
        "import resource, sys\n"
        "from cocurve_lab.atomic import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "write_atomically(sys.argv[1], bytes(100_000))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "OSError" in done.stderr
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_stops_the_writer_leaves_what_was_there(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def stops(path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_bytes(b"old")
    folder.mkdir()
    (folder / "part").write_bytes(b"old")
    with pytest.raises(error), replacing(file, keep_previous=True) as temporary:
        stops(temporary)
    with pytest.raises(error), replacing_folder(folder) as temporary:
        stops(temporary / "part")
    assert sorted(tmp_path.iterdir()) == [file, folder]
    assert (file.read_bytes(), (folder / "part").read_bytes()) == (b"old", b"old")


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    for name in ("one", "two"):
        with replacing_folder(folder) as temporary:
            (temporary / name).write_text(name)
            assert folder.parent in temporary.parents
            assert temporary.stat().st_dev == folder.parent.stat().st_dev
    assert [path.name for path in folder.iterdir()] == ["two"]
    assert list(folder.parent.iterdir()) == [folder]


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    curvature = random_curvature(make_units())
    path = curvature.save(tmp_path / "H.pkl")
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        random_curvature(make_units(), 1).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


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
