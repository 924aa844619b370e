"""Training a stream: engines, the step, checkpoints, the journal, the loop."""
