"""The version of the package, on every page."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig

import tl_layersim


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Hand the version to the theme."""
    config.extra["release"] = tl_layersim.__version__
    config.copyright = f"tl_layersim {tl_layersim.__version__}, MIT licence"
    return config
