"""The one decorator that checks shapes and types of public calls: jaxtyping with beartype.

A checked call costs tens of microseconds, so it stands on what users call and on results, never inside a kernel:
kernels travel to machines that have neither package.
"""

from __future__ import annotations

from beartype import beartype
from jaxtyping import jaxtyped

typed = jaxtyped(typechecker=beartype)

__all__ = ["typed"]
