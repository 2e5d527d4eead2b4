"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .base import Analyzer as Analyzer
from .base import Exchange as Exchange
from .base import Run as Run
from .base import SiteNeed as SiteNeed
from .base import find_analyzers as find_analyzers
from .base import need_head as need_head
from .base import need_tokens as need_tokens
