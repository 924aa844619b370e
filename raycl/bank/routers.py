"""A router's state in and out of a snapshot."""

from __future__ import annotations

from raycl.bank.bank import Bank, ObjectReader
from raycl.bank.manifest import ModelInfo, RouterInfo, Snapshot
from raycl.bank.tensors import views
from raycl.types import RouterState

ENCODER = "encoder"


def put_router(bank: Bank, state: RouterState) -> tuple[RouterInfo, ModelInfo | None]:
    """Store its tensors; its entry in a snapshot, and that of its encoder."""
    tensors = bank.put(state.tensors) if state.tensors else None
    if state.encoder is None:
        return RouterInfo(kind=state.kind, settings=state.settings, tensors=tensors), None
    router = RouterInfo(kind=state.kind, settings={**state.settings, ENCODER: state.encoder}, tensors=tensors)
    return router, ModelInfo(name=str(state.encoder["name"]), sha256=state.encoder_sha256, kind="sentence encoder")


def get_router(reader: ObjectReader, snapshot: Snapshot) -> RouterState:
    """Back from a snapshot; its tensors are read-only.

    Raises:
        BankError: its tensors are missing or damaged.
    """
    router = snapshot.router
    settings = {key: value for key, value in router.settings.items() if key != ENCODER}
    what, tensors = f"the router of snapshot {snapshot.number}", {}
    if router.tensors:
        (data,) = reader.read_objects([(what, router.tensors)])
        tensors = views(data, what)
    encoder = snapshot.encoder.sha256 if snapshot.encoder else ""
    return RouterState(router.kind, settings, tensors, router.settings.get(ENCODER), encoder)
