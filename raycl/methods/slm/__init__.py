"""SLM: scalable language model with dynamic task-related knowledge retrieval."""
