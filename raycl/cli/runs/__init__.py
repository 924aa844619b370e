"""Commands about runs: train, sweep and compare, and what became of them."""
