"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .anatomy import Anatomy as Anatomy
from .anatomy import Stack as Stack
from .blocks import anatomy_of as anatomy_of
from .blocks import choose_blocks as choose_blocks
from .blocks import find_stacks as find_stacks
from .blocks import layer_names as layer_names
from .hook_points import HookPoint as HookPoint
from .hook_points import Part as Part
from .hook_points import StreamSum as StreamSum
from .site_selection import find_points as find_points
from .site_selection import stream_sums as stream_sums
from .unembed import Head as Head
from .unembed import Unembed as Unembed
