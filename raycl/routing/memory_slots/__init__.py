"""SLM's memory slots: keys, nearest-key search, mixture weights, and their router."""
