"""Training a stream: engines, the step, checkpoints, the ledger, the loop. Knows nothing of Ray."""
