"""Tables and pictures of finished runs, made from their result files.

Numbers must be readable without the code, the model or the machine that produced them. Reads result trees alone; does
not depend on torch, methods or training.
"""
