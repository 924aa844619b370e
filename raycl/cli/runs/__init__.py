"""Commands about runs: train, sweep and compare, and their results."""
