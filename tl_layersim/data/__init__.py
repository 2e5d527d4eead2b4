"""Rows, batches and labels from whatever a user passes as data."""
