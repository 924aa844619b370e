"""Files as rows: readers, checks, and the node-local cache."""
