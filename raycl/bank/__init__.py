"""The bank of learned adapters: versioned, immutable, hash-checked, shared.

Does not depend on methods, models or mixtures: it stores `raycl.types.AdapterState` and gives it back.
"""

from raycl.bank.bank import Bank, NewSnapshot
from raycl.bank.manifest import AdapterManifest, AdapterRef, Snapshot

__all__ = ["AdapterManifest", "AdapterRef", "Bank", "NewSnapshot", "Snapshot"]
