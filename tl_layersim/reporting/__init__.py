"""Figures of results by kind, and the HTML page of a report.

Other packages may import from these modules when they draw: `figures`, `curves`, `connections`, `models`, `network`,
`notebook`, `overlays`, `panels`, `report_panels`, `scatter`, `stitches`, `sweeps`, `tokens`, `token_paths`, `differences`,
`interval_bands`, `html`; `labels` and `site_labels`, quantities and sites in words; `style`, colours.
"""
