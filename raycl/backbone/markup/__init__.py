"""What a tokenizer makes of markup: chat templates, and the strings of special tokens."""
