"""Routers: which adapters are active for a text, and with which weights.

What it does not know: adapters' weights, methods, models that are mixed.
"""
