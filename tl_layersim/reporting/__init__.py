"""Figures of results by kind, and the HTML page of a report."""
