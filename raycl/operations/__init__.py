"""What is done to banks and runs: export, merge, plan, sweep, compare, report."""
