"""Rows that are answered and scored: for a run's matrix, the gate, unlearning and `raycl evaluate`."""
