"""The endpoint on Ray Serve: application, resources, command."""
