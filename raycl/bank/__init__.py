"""Where learned adapters live: versioned, immutable, hash-checked, shared.

What it does not know: methods, models, mixtures. It stores `raycl.types.AdapterState` and gives it back.
"""

from raycl.bank.bank import Bank
from raycl.bank.manifest import AdapterManifest, AdapterRef, Snapshot

__all__ = ["AdapterManifest", "AdapterRef", "Bank", "Snapshot"]
