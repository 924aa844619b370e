"""Decoding: continuous batches, dynamic and static key-value caches, CUDA graphs, sampling."""
