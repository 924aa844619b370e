"""The parts of the suite: each module has `cases(setup)`, the cases of its part in order of value."""
