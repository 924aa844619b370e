"""The serving engine: requests are routed, batched and answered by one model."""
