"""The accuracy matrix of one run as a picture, without matplotlib until it is drawn."""

from pathlib import Path

from raycl.config import Tree


def draw_matrix(result: Tree, path: Path) -> None:
    """Draw the matrix of a result tree as a PNG."""
    from raycl.operations.report.plots import (  # brings matplotlib, which a run without tracker does without
        matrix_figure,
        save_png,
    )

    save_png(matrix_figure([result]), path)
