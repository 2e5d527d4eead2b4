"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .probe import Probe as Probe
