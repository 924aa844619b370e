"""The config tree of a run, its checks, its assembly, and its extension by more tasks."""
