"""The playground: a page at `/` that uses the endpoint as any other client would, and shows its answers and mixtures.

To see which adapters are active for a text. The page is plain files beside this one (`raycl.launch.http.page_files`).
"""

from __future__ import annotations

from fastapi import FastAPI

from raycl.launch.http.page_files import add_page


def add_playground(app: FastAPI) -> None:
    """Serve the page at `/` and its files below `/playground/`."""
    add_page(app, __name__, "/playground")
