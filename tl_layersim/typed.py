"""The one decorator that checks shapes and types of public calls: jaxtyping with beartype.

A checked call costs tens of microseconds, so it stands on what users call and on results, never inside a kernel:
kernels travel to machines that have neither package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from jaxtyping import jaxtyped


@contextmanager
def _without_mounted_save() -> Iterator[None]:
    """Take nnsight's `.save` off `object` for a moment.

    nnsight mounts it for every Python object; beartype hashes all of `object`'s attributes while it is imported, and this
    one has no hash. So `import nnsight` before the first `import beartype` fails without this.
    """
    mounted = object.__dict__.get("save")
    if mounted is None or "nnsight" not in sys.modules:
        yield
        return
    from nnsight import save
    from nnsight._c import mount, unmount

    unmount("save")
    try:
        yield
    finally:
        mount(save, "save")


with _without_mounted_save():
    from beartype import beartype

typed = jaxtyped(typechecker=beartype)

__all__ = ["typed"]
