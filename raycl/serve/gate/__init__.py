"""The evaluation gate: a candidate is scored against the active snapshot before it answers."""
