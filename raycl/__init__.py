"""raycl: continual learning of language models on Ray.

Why it exists: one model learns tasks that arrive one after another; accuracy and forgetting are reported for
every task.
What it does not know: nothing is imported here, so that `import raycl` stays instant on every worker.
"""

__version__ = "0.1.0"
