"""Commands on a bank: maintenance, import and export, unlearning."""
