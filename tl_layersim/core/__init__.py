"""Errors, sums, results and files: what every other package builds on. Imports no model library."""
