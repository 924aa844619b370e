"""Makes the laboratory of tiny models, which lives with the contract suite, importable here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "contract"))
