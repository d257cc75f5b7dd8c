"""The memory that a process may take, under made-up control groups and real limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cocurve_lab.base.memory import free_memory

GIB = 1 << 30


def group(folder: Path, bound: str, most: int | str, used: str, now: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / bound).write_text(f"{most}\n")
    (folder / used).write_text(f"{now}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 8}\nactive_file 0\n")


@pytest.mark.parametrize(
    ("line", "place"), [("0::/a/b", "a/b"), ("0::/a/b", "a"), ("0::/gone/on/the/host", "")]
)
def test_the_tightest_group_of_version_2_counts(line: str, place: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text(f"{line}\n")
    group(tmp_path / "a" / "b", "memory.max", "max", "memory.current", 1)
    group(tmp_path / place, "memory.max", GIB, "memory.current", GIB // 2)
    assert free_memory(tmp_path, own) == GIB // 2 + GIB // 8


def test_a_group_of_version_1_counts(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "memory" / "job"
    own.write_text("9:name=systemd:/x\n4:memory:/job/1\n")
    group(folder, "memory.limit_in_bytes", GIB, "memory.usage_in_bytes", GIB // 2)
    assert free_memory(tmp_path, own) == GIB // 2 + GIB // 8


def test_a_limit_of_the_process_counts() -> None:
    program = (
        "import resource; from cocurve_lab.base.memory import free_memory;"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31)); print(free_memory())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 0 < float(ran.stdout) < 1 << 31
