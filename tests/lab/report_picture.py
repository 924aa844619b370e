"""The picture of the page of all methods (`docs/report.png`) has the table that it shows as text inside.

So a test finds one that is outdated: `python tests/lab/pictures.py docs/results/methods-*.csv --report` makes it again.
"""

from collections.abc import Iterable
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from raycl.operations.report.page.recorded_sections import recorded_sections, studies_of
from raycl.operations.report.recorded_runs import RecordedRuns

SHOWN = "shown"
"""Name of the text in the picture."""


def overview(files: Iterable[Path]) -> str:
    """Return the table of the first section of a page about recorded runs."""
    studies = studies_of([RecordedRuns(file) for file in files])
    return str(recorded_sections(studies)[0].numbers[0])


def write_shown(path: Path, text: str) -> None:
    """Write a text into a picture."""
    about = PngInfo()
    about.add_itxt(SHOWN, text)
    with Image.open(path) as picture:
        picture.save(path, pnginfo=about, optimize=True)


def shown_in(path: Path) -> str:
    """Return the text in a picture; "": it has none."""
    with Image.open(path) as picture:
        return str(picture.info.get(SHOWN, ""))
