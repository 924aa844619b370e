"""A router's state in and out of a snapshot."""

from __future__ import annotations

from raycl.bank.bank import Bank, ObjectReader
from raycl.bank.manifest import ModelInfo, RouterInfo, Snapshot
from raycl.bank.tensors import views
from raycl.types import RouterState

ENCODER = "encoder"


def put_router(bank: Bank, state: RouterState) -> tuple[RouterInfo, ModelInfo | None]:
    """Store a router's tensors, and return its entry in a snapshot and that of its encoder."""
    tensors = bank.put(state.tensors) if state.tensors else None
    settings = state.settings if state.encoder is None else {**state.settings, ENCODER: state.encoder}
    router = RouterInfo(kind=state.kind, settings=settings, tensors=tensors, package=state.package)
    if state.encoder is None:
        return router, None
    return router, ModelInfo(name=str(state.encoder["name"]), sha256=state.encoder_sha256, kind="sentence encoder")


def get_router(reader: ObjectReader, snapshot: Snapshot) -> RouterState:
    """Return the router of a snapshot; its tensors are read-only.

    Raises:
        BankError: the router's tensors are missing or damaged.
    """
    router = snapshot.router
    settings = {key: value for key, value in router.settings.items() if key != ENCODER}
    what, tensors = f"the router of snapshot {snapshot.number}", {}
    if router.tensors:
        (data,) = reader.read_objects([(what, router.tensors)])
        tensors = views(data, what)
    encoder = snapshot.encoder.sha256 if snapshot.encoder else ""
    return RouterState(router.kind, settings, tensors, router.settings.get(ENCODER), encoder, router.package)
