"""Records of a run: checkpoints, journal, results, progress, fork points, stop signals, published snapshots."""
