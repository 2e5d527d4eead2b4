"""Analyses on a Ray cluster, and a worker that measures rows for Spark, `concurrent.futures` and other engines.

`analyze_on_ray` needs the package `ray` (the extra `[ray]`), `Worker` does not. No other package imports from here.
"""

from .api import analyze_on_ray
from .worker import Worker

__all__ = ["Worker", "analyze_on_ray"]
