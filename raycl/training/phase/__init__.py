"""One phase of a run: preparation, training step by step, evaluation."""
