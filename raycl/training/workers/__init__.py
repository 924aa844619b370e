"""The workers of a run: who they are, what memory they hold, how they stop."""
