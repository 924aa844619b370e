"""SAPT: shared attention over task adapters, with attentive reflection on pseudo-samples."""
