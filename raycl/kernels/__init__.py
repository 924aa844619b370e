"""Arithmetic worth its own code, each with a plain-torch twin: one read of activations, gradients of chosen rows."""
