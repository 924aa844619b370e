"""Tables and pictures of a sweep."""
