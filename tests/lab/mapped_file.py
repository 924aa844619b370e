"""The file that is mapped into this process at an address."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def files_at(addresses: Iterable[int]) -> list[str]:
    """Return the file that this process has mapped at each address; "": none. The table of maps, which has thousands
    of lines, is read once for all of them."""
    mapped: list[tuple[int, int, str]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.count("/"):
            mapping, *_, name = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in mapping.split("-"))
            mapped.append((first, last, name))
    return [next((name for first, last, name in mapped if first <= at < last), "") for at in addresses]


def file_at(address: int) -> str:
    """Return the file that this process has mapped there; "": none."""
    (result,) = files_at([address])
    return result


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
