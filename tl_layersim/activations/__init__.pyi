"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .block_call import BlockCall as BlockCall
from .view import Kernel as Kernel
from .view import SiteBuffer as SiteBuffer
from .view import View as View
from .view import reduce as reduce
