"""How much host memory this process may still take."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes"]


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping: what the system has left, or its control group if that is less.

    None where the system does not say. `root` is the directory that holds ``proc`` and ``sys``.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        left = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    return min(left + _left_in_groups(root), default=None)


def _left_in_groups(root: Path) -> list[int]:
    """Bytes left in each control group around this process, versions 1 and 2."""
    try:
        memberships = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    left = []
    for _, controllers, path in memberships:
        if controllers == "":
            top, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.strip("/")
        # In a container the path may be the host's; its own group is then the top one.
        groups = [group, *group.parents][: len(group.relative_to(top).parts) + 1]
        left += [bytes_left for directory in groups if (bytes_left := _left(directory, *files)) is not None]
    return left


def _left(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """Limit less usage of one control group; page cache that can be dropped counts as left. None without a limit."""
    try:
        limit = (directory / limit_file).read_text().strip()
        usage = int((directory / usage_file).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) - usage + int(stat.get(reclaimable, 0))
