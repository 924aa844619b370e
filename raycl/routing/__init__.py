"""Routers: which adapters are active for a text, and with which weights.

Does not depend on methods or on the weights of adapters.
"""
