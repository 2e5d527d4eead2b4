"""Figures, made from five primitives, and the HTML page of a report.

`figures` chooses a field's figure: `heat_map`, `lines` (also quantiles and paths), `bars`, `network` or `token_grid`.
`panels` puts figures beside one another; `html` writes the page, `notebook` what notebooks show, `findings` the sentences.
`style` holds sizes, colours and layout; `colour_scales`, `interval_bands` and `site_labels` what the primitives share.
Figures of tables of many runs are in `run_figures`, `models`, `differences`, `scatter` and `stitches`.
"""
