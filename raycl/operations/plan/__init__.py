"""Plans of runs by arithmetic: memory, traffic, time and disk, before anything is started or loaded."""
