"""Statistics fitted to the vectors of texts in closed form: a discriminant, out-of-distribution scores."""
