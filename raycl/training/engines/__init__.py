"""Training engines behind one protocol: PyTorch and DeepSpeed."""
