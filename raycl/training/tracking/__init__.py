"""Trackers of a run's numbers: Weights & Biases, TensorBoard, MLflow and Trackio, each in a module of its own."""
