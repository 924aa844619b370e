"""The router in front of an engine that answers elsewhere: a request gets the name of an exported adapter."""
