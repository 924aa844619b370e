"""How a sweep searches: search algorithms, early stopping."""
