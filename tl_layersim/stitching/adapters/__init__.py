"""Kinds of adapters: a module in this package with a subclass of `AdapterKind` is a new kind, without further edits.

Examples:
    >>> sorted(ADAPTER_KINDS.all())
    ['affine', 'affine-norm', 'identity', 'linear']
"""

from ...core.functions import Registry
from .kind import AdapterKind

ADAPTER_KINDS = Registry(__name__, AdapterKind, "kind")
