"""Tables and pictures of finished runs, made from their result files.

Why it exists: numbers must be readable without the code, the model or the machine that produced them.
What it does not know: torch, methods, training; it reads result trees only.
"""
