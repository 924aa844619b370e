"""Sweeps: hyper-parameters of whole streams, searched with Ray Tune; one trial is one run on one stream."""
