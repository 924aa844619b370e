"""Operations on banks and runs: export, merge, plan, sweep, compare, report."""
