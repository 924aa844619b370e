"""Models are loaded one after another in a process.

Transformers replaces methods of its classes while it loads a model (`no_tie_weights`) and restores the previous ones
afterwards. When two threads load at once, the second one restores the replacement, and from then on no model of the
process ties its weights.
"""

from __future__ import annotations

import threading

ONE_AT_A_TIME = threading.RLock()
"""Held while a model is loaded."""
