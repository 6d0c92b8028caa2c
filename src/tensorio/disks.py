"""What the system says about the place a file is in, and about memory."""

from __future__ import annotations

__all__ = ["available_memory"]


def available_memory() -> int:
    """Return the bytes that new memory may take before the system is in trouble; very many where nothing tells."""
    try:
        with open("/proc/meminfo", "rb") as f:
            for line in f:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
