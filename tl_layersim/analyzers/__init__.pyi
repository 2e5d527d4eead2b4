"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .analyzer import Analyzer as Analyzer
from .analyzer import Exchange as Exchange
from .analyzer import Run as Run
from .analyzer import find_analyzers as find_analyzers
from .analyzer import need_head as need_head
from .analyzer import need_tokens as need_tokens
from .needs import Needs as Needs
