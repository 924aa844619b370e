"""Files of results where a user wants them."""

from pathlib import Path

from raycl.errors import StorageError


def write_output(path: str | Path, content: bytes, appends: bool = False) -> Path:
    """Write a file, or more of it, and its folder where there is none.

    Raises:
        StorageError: it cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab" if appends else "wb") as file:
            file.write(content)
    except OSError as error:
        raise StorageError(
            f"cannot write '{target}': {error}: name a file in a folder that you may write to"
        ) from error
    return target
