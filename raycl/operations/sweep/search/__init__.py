"""What a sweep searches: spaces, metrics, search algorithms, early stopping."""
