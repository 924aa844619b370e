"""What a sweep is: its settings, space, expressions and metrics, and the folder that records it."""
