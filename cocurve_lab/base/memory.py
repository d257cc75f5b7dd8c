"""Memory that this process may still take: of the machine, under its own limits and its groups'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# what bounds a control group, and what it holds: of version 2, and of version 1
_BOUNDS = {
    "": ("memory.max", "memory.current"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def free_memory(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float:
    """Return the bytes that this process may still take on the CPU.

    A container (Docker, Kubernetes, Slurm) sees the memory of its host, and is killed where it
    takes more than its control group holds.

    Args:
        groups: where control groups are mounted.
        own: which groups this process is in.
    """
    import psutil

    process = psutil.Process()
    left = [float(psutil.virtual_memory().available), *_left_by_groups(groups, own)]
    if hasattr(process, "rlimit"):  # on Linux
        taken = process.memory_info()
        for limit, used in ((psutil.RLIMIT_DATA, taken.data), (psutil.RLIMIT_AS, taken.vms)):
            most = process.rlimit(limit)[0]
            if most != psutil.RLIM_INFINITY:
                left.append(float(most - used))
    return max(0.0, min(left))


def _left_by_groups(mount: Path, own: Path) -> Iterator[float]:
    lines = own.read_text().splitlines() if own.exists() else []
    for line in lines:
        _, kind, path = line.split(":", 2)
        root = mount / kind
        place = root / path.lstrip("/")
        # a container may see the path on its host, which is not there: its root has its own limits
        for folder in (place, *place.parents) if kind in _BOUNDS else ():
            with suppress(OSError, ValueError):  # no such file, or no bound ("max")
                most, used = (int((folder / name).read_text()) for name in _BOUNDS[kind])
                yield float(most - used + _cached(folder))
            if folder == root:
                break


def _cached(group: Path) -> int:
    """Bytes of files that the kernel gives back when memory is short."""
    with suppress(OSError):
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))
    return 0
