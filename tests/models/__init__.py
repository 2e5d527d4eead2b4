"""Tiny models of every kind that the tests run, and their residual streams and sites read by the tests' own hooks."""
