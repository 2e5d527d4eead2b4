"""Figures, made from five primitives (heat map, lines, bars, network, token grid), and the HTML page of a report."""
