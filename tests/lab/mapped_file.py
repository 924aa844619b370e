"""The file that is mapped into this process at an address."""

from __future__ import annotations

from pathlib import Path


def file_at(address: int) -> str:
    """Return the file that this process has mapped there; "": none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        mapping, *_, name = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
        first, last = (int(end, 16) for end in mapping.split("-"))
        if first <= address < last:
            return str(name)
    return ""


def copied_bytes(file: str) -> int:
    """Return the bytes of a mapped file that this process has copies of, since it wrote there."""
    result, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            is_ours = rest[-1] == file
        elif is_ours and name == "Anonymous:":
            result += 1024 * int(rest[0])
    return result
