"""Which adapters answer a text, and how loudly: routers, found in a snapshot by their kind.

What it does not know: adapters' weights, methods, models that are mixed.
"""
