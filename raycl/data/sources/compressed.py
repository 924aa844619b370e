"""Compressed files that a library reads: how far they expand is known before it fills memory or disk with them."""

from __future__ import annotations

import lzma
import zipfile
import zlib
from pathlib import Path

from raycl.data.sources.fields import Refuse
from raycl.data.sources.limits import ReadLimits

_CHUNK = 1 << 20
_SHORT = {".tgz": "gzip", ".tbz2": "bz2", ".txz": "xz"}


def check_compressed(path: Path, limits: ReadLimits, refuse: Refuse) -> None:
    """Check how far a compressed file expands.

    Raises:
        DataError: it is damaged, or expands further than the limits allow.
    """
    import fsspec  # only `datasets` reads these
    from fsspec.utils import infer_compression

    kind = _SHORT.get(path.suffix.lower()) or infer_compression(path.name)
    if kind is None:
        return
    size, expanded = path.stat().st_size, 0
    try:
        if kind == "zip":
            expanded = sum(member.file_size for member in zipfile.ZipFile(path).infolist())
        else:
            with fsspec.open(str(path), "rb", compression=kind) as stream:
                while expanded <= limits.expanded_bytes(size) and (chunk := stream.read(_CHUNK)):
                    expanded += len(chunk)
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        refuse(f"'{path.name}' cannot be expanded ({error}): compress it again")
    if expanded > limits.expanded_bytes(size):
        refuse(f"'{path.name}': {limits.too_expanded(size)}")
