"""Files and folders are replaced whole, whatever stops the writer, and nothing is left over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cocurve_lab.base.atomic import clean, previous, replacing, replacing_folder, write_atomically
from cocurve_lab.base.errors import NoRoomError
from helpers import killing


def test_write_replaces_and_can_keep_the_previous(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / ("n" * 240)  # about as long as a name can be
    mask = os.umask(0o022)
    write_atomically(path, b"one")
    assert os.umask(mask) == 0o022  # looking at the mask leaves it alone
    assert stat.S_IMODE(path.stat().st_mode) == 0o644  # the group can read it
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert not previous(path).exists()
    write_atomically(path, b"three", keep_previous=True)
    assert (path.read_bytes(), previous(path).read_bytes()) == (b"three", b"two")
    assert sorted(path.parent.iterdir()) == [path, previous(path)]


@pytest.mark.parametrize("keep_previous", [False, True])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_previous: bool
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoRoomError):
        write_atomically(path, b"new", keep_previous=keep_previous)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("module", "call"),
    [(os, "chmod"), (os, "fsync"), (fcntl, "flock"), (os, "link"), (shutil, "disk_usage")],
)
def test_a_place_without_a_nicety_takes_results(
    module: Any, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drives for Windows, network shares and folders of a cloud lack one or another."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(module, call, refused)
    for text in (b"one", b"two"):
        write_atomically(tmp_path / "file", text, keep_previous=True)
        with replacing_folder(tmp_path / "folder", size=5) as temporary:
            (temporary / "file").write_bytes(text)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "folder" / "file").read_bytes() == b"two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "file.previous", "folder"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, PermissionError])
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


def test_a_disk_of_no_size_gives_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 0))
    write_atomically(tmp_path / "file", b"x")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9, 9, 0))
    with pytest.raises(NoRoomError):
        write_atomically(tmp_path / "file", b"y")


# Killed -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The kills of all kinds, from one process: importing torch takes longer than most of them."""
    tests, root = Path(__file__).parents[1], Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (tests, root, root / "widgets")))
    folder = tmp_path_factory.mktemp("kills")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "helpers.killing", str(folder)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr and "Operation not permitted" in done.stderr:
        pytest.skip("this container allows no ptrace")
    assert done.returncode == 0, done.stderr[-2000:]
    kills: dict[str, Any] = json.loads(done.stdout)
    return kills


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in killing.MACHINES, reason="no table of system calls")
@pytest.mark.skipif(sys.platform != "linux", reason="needs ptrace")
@pytest.mark.parametrize("kind", killing.KINDS)
def test_a_kill_at_any_system_call_loses_nothing(kind: str, kills: dict[str, Any]) -> None:
    points = kills[kind]
    calls = [point[0] for point in points]
    assert "fsync" in calls
    assert "flock" in calls or kind == "two renames"  # its kills start when the folder is filled
    assert {point[1] for point in points} >= {"old", "new"}
    for call, at_once, cleaned, again, strangers in points:
        # two renames have one moment between them, which the next save or load mends
        assert at_once in ("old", "new") or kind == "two renames", call
        assert cleaned in ("old", "new"), call
        assert (again, strangers) == ("new", []), call
    nothing = [point for point in points if point[1] == "nothing"]
    assert len(nothing) == (kind == "two renames")


def held(folder: Path, kind: str) -> subprocess.Popen[str]:
    """A process that has begun to write in a folder, and waits."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from cocurve_lab.base.atomic import replacing, replacing_folder\n"
        f"with {kind}(Path(sys.argv[1])) as temporary:\n"
        "    print(temporary, flush=True)\n"
        "    time.sleep(60)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder / "result")], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("kind", ["replacing", "replacing_folder"])
def test_what_a_running_process_writes_stays_and_what_a_dead_one_left_goes(
    kind: str, tmp_path: Path
) -> None:
    with held(tmp_path, kind) as writer:
        assert writer.stdout is not None
        temporary = Path(writer.stdout.readline().strip())
        assert temporary.exists()
        write_atomically(tmp_path / "other", b"x")
        clean(tmp_path)
        assert temporary.exists()
        writer.send_signal(signal.SIGKILL)
    assert temporary.exists()
    write_atomically(tmp_path / "other", b"y")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_cleaning_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    """A link with such a name, and names that are only like it."""
    (tmp_path / "victim" / "new").mkdir(parents=True)
    (tmp_path / ".cocurve-1234abcd.partial").symlink_to(tmp_path / "victim")
    (tmp_path / ".cocurve-notes").write_text("mine")
    (tmp_path / ".cocurve-87654321.partial").mkdir()
    (tmp_path / ".cocurve-87654321.partial" / "notes").write_text("no lock, so not from here")
    clean(tmp_path)
    assert (tmp_path / "victim" / "new").exists()
    assert (tmp_path / ".cocurve-notes").exists()
    assert (tmp_path / ".cocurve-87654321.partial" / "notes").exists()


def planted(place: Path, part: str, victim: Path) -> Path:
    """What looks like the leftover of a killed process, with a link to somebody's files."""
    (victim / "folder").mkdir(parents=True)
    (victim / "file").write_text("precious")
    partial = place / ".cocurve-0badf00d.partial"
    partial.mkdir(parents=True)
    (partial / "lock").touch()
    (partial / part).parent.mkdir(exist_ok=True)
    (partial / part).symlink_to(victim)
    return partial


@pytest.mark.parametrize("part", ["old", "new", "old/model"])
def test_a_link_in_a_leftover_is_not_followed(part: str, tmp_path: Path) -> None:
    planted(tmp_path / "place", part, tmp_path / "victim")
    write_atomically(tmp_path / "place" / "file", b"x")
    assert sorted(path.name for path in (tmp_path / "victim").iterdir()) == ["file", "folder"]
    shown = [path.name for path in (tmp_path / "place").iterdir() if path.name[0] != "."]
    assert shown == ["file"]


def test_a_leftover_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / ".cocurve-0badf00d.partial"
    (partial / "old" / "model").mkdir(parents=True)
    (partial / "lock").touch()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    clean(tmp_path)
    assert (partial / "old" / "model").exists()
    monkeypatch.setattr(os, "geteuid", lambda: me)
    clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_threads_that_write_one_file_leave_one_of_theirs(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    payloads = [bytes([number]) * 5000 for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda payload: write_atomically(tmp_path / "file", payload), payloads))
    assert (tmp_path / "file").read_bytes() in payloads
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
