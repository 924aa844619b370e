"""One command for everything that only a GPU can answer: `python jobs/benchmark.py gpu`.

A GPU is rarely at hand and never for long, so the measurements are complete before it is, and each one runs tiny on a
CPU first. Weights are random and made on the device: no files, no network, and neither Ray, DeepSpeed nor FAISS.
"""
