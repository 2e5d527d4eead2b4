"""Mutation testing of the measures: `make mutation`. See README.md beside this file; pytest collects nothing here."""
