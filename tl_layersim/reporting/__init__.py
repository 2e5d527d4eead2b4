"""Figures of results and tables, and the HTML page of a report."""
