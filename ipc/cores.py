"""How many cores this process may use, and how many processes of each kind that suggests."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_quota(cgroup: Path = CGROUP) -> float | None:
    """The container's limit in cores, None without one."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def usable_cores() -> int:
    """Logical cores, within the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, min(cores, int(quota))) if quota is not None else cores


def default_frontends(cores: int) -> int:
    """A token costs the frontend most: parsing, HTTP and one system call for each write."""
    return min(8, max(1, cores // 4))


def default_tokenizers(cores: int) -> int:
    """Each encodes some 350 prompts of 1,000 words a second."""
    return min(6, max(1, cores // 5))


def default_detokenizers(cores: int) -> int:
    """One keeps up with two or three frontends."""
    return min(4, max(1, cores // 8))
