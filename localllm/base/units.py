"""Format sizes in bytes for people."""

from __future__ import annotations


def size(count: float) -> str:
    """Format a number of bytes in binary units: "1.10 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError
