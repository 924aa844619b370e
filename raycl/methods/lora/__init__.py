"""Methods on LoRA adapters without a router."""
