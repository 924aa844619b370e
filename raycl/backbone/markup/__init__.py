"""Markup of tokenizers: chat templates, and the strings of special tokens."""
