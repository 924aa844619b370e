"""Named benchmarks: task orders, known tasks, folder layouts, and the built-in stream."""
