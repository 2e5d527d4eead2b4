"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .server_capabilities import Capabilities as Capabilities
from .server_capabilities import capabilities as capabilities
