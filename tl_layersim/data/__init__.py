"""Data of any accepted kind as rows of tokens, batches and labels."""
