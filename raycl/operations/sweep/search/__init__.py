"""Search algorithms and early stopping of sweeps."""
