"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .exit_heads import ExitHeads as ExitHeads
