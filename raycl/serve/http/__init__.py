"""HTTP: the ASGI application, request and response schema, access control, the playground."""
