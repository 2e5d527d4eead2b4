"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .ray import analyze_on_ray as analyze_on_ray
from .submitted_runs import RemoteRun as RemoteRun
