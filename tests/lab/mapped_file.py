"""Which file is mapped into this process at an address.

What it does not know: what the memory holds.
"""

from __future__ import annotations

from pathlib import Path


def file_at(address: int) -> str:
    """The file that this process has mapped there; "": none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
        first, last = (int(end, 16) for end in place.split("-"))
        if first <= address < last:
            return str(name)
    return ""
