"""One self-contained HTML page of a report: what was measured on what, a table, every plot and what it means."""

from __future__ import annotations

import os
from pathlib import Path

from jinja2 import Environment

from .plotting import FONT
from .results import Report

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{{ title }}</title>
<style>
  body { font: 15px/1.5 {{ font }}; color: #1c2733; margin: 0 auto; max-width: 1320px; padding: 24px 28px 60px; }
  h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 19px; margin: 36px 0 8px; border-top: 1px solid #dde3ea; padding-top: 20px; }
  .lead { color: #53616f; margin: 0 0 18px; }
  table { border-collapse: collapse; margin: 8px 0 16px; } th, td { text-align: left; padding: 4px 16px 4px 0; vertical-align: top; }
  th { color: #53616f; font-weight: 600; } tbody tr { border-top: 1px solid #eef1f4; } td.number { font-variant-numeric: tabular-nums; }
  .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(600px, 1fr)); gap: 20px; }
  figure { margin: 0; } figcaption { color: #39475a; max-width: 600px; padding: 0 12px; }
  details { margin: 8px 0; } summary { cursor: pointer; color: #2a5c9a; } code { font-size: 13px; overflow-wrap: anywhere; }
</style>
<script>{{ plotly }}</script>
</head>
<body>
<h1>{{ title }}</h1>
<p class="lead">How the layers of the residual stream relate, measured by tl_layersim. Layer "embed" is what enters block 0; layer
i is what leaves block i, before the final norm.</p>
<table>
<thead><tr><th>analyzer</th><th>measure</th><th>value</th></tr></thead>
<tbody>
{% for section in sections %}{% for key, value in section.headline %}
<tr><td>{{ section.name }}</td><td>{{ key }}</td><td class="number">{{ value }}</td></tr>
{% endfor %}{% endfor %}
</tbody>
</table>
{% for section in sections %}
<h2>{{ section.name }}</h2>
<div class="plots">
{% for plot in section.plots %}
<figure>{{ plot.html }}<figcaption>{{ plot.meaning }}</figcaption></figure>
{% endfor %}
</div>
<details><summary>What was measured on what</summary>
<table><tbody>
{% for key, value in section.provenance %}<tr><th>{{ key }}</th><td><code>{{ value }}</code></td></tr>
{% endfor %}</tbody></table>
</details>
{% endfor %}
</body>
</html>
"""


def write_html(report: Report, path: str | os.PathLike[str]) -> Path:
    """Write the page; it opens from disk and needs no network.

    Raises:
        OSError: the file cannot be written.
    """
    import plotly.io
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    sections = []
    for name, result in report.items():
        plots = [
            {
                "html": Markup(plotly.io.to_html(result.plot(p.field), include_plotlyjs=False, full_html=False, config={"displaylogo": False})),
                "meaning": p.meaning,
            }
            for p in result.pictures
        ]
        provenance = {key: value for key, value in vars(result.provenance).items() if value is not None}
        provenance["seconds"] = round(result.provenance.seconds, 2)
        for key in ("options", "versions"):
            provenance[key] = ", ".join(f"{k}={v}" for k, v in provenance[key].items() if v is not None)
        headline = [(key, f"{value:.4f}") for key, value in result.headline().items()]
        sections.append({"name": name, "headline": headline, "plots": plots, "provenance": provenance.items()})
    first = next(iter(report.values()), None)
    title = f"Layers of {Path(first.provenance.model).name if first else 'no model'}"
    template = Environment(autoescape=True).from_string(PAGE)
    html = template.render(title=title, font=Markup(FONT), sections=sections, plotly=Markup(get_plotlyjs()))
    path = Path(path)
    path.write_text(html, encoding="utf-8")
    return path
