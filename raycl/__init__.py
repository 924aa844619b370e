"""raycl: continual learning of language models on Ray.

Why it exists: one model learns tasks that arrive one after another, and says truthfully what it kept.
What it does not know: nothing is imported here, so that `import raycl` stays instant on every worker.
"""

__version__ = "0.1.0"
