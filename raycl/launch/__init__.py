"""Starting runs on Ray: clusters, the driver, workers, progress on the terminal, signals and status."""
