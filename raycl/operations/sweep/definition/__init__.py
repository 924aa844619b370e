"""The definition of a sweep: settings, space, expressions and metrics, and the folder that records it."""
