"""Names that become files and folders: of runs, sweeps, tasks and adapters, in any script."""

import unicodedata
from typing import Annotated

from pydantic import AfterValidator

LONGEST = 180
"""Bytes of a name in UTF-8: file systems take 255, and files are written under longer names first."""

REFERENCE_SIGNS = "@=,"
"""Signs that separate several names, as in `--adapters NAME=WEIGHT,NAME=WEIGHT` and `NAME@VERSION`."""

_UNPRINTED = ("Cc", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode's categories of control characters, lone surrogates, characters that are none, and line separators."""


def problem_of(name: str, refused: str = "") -> str:
    """Return why a name cannot be that of a file or folder, and what is expected instead; "" where it can.

    Args:
        refused: signs that are refused in addition to those of paths.
    """
    if not name or name != name.strip():
        return "it is empty or has white space at an end: expected a plain name, letters of any script"
    if name.startswith(".") or ".." in name:
        return "it begins with a dot or has '..' in it: expected a plain name, letters of any script"
    if sign := next((sign for sign in f"/\\{refused}" if sign in name), ""):
        return f"it has '{sign}' in it: expected a plain name, letters of any script"
    if any(unicodedata.category(sign) in _UNPRINTED for sign in name):
        return "it has a control character or a lone surrogate in it: expected a plain name, letters of any script"
    size = len(name.encode())
    return f"it has {size} bytes in UTF-8: expected at most {LONGEST}" if size > LONGEST else ""


def _folder_name(value: str) -> str:
    if problem := problem_of(value):
        raise ValueError(f"{shown(value)} cannot name a folder, {problem}")
    return value


FolderName = Annotated[str, AfterValidator(_folder_name)]
"""The type of settings that name a folder."""


def shown(name: str) -> str:
    """Return a name in a message: control characters as escapes, a long one cut."""
    return ascii(name) if not name.isprintable() else f"'{name if len(name) <= 100 else f'{name[:100]}...'}'"
