"""Figures of results by kind, and the HTML page of a report.

Other packages may import from these modules when they draw: `figures`, `curves`, `matrix`, `models`, `network`, `sweeps`,
`tokens`, `differences`, `interval_bands`, `html`, `panels`, `notebook`; `labels` and `site_labels`, quantities and sites in
words; `style`, colours.
"""
