"""The public names: those of `tl_layersim`, and those of the packages that it lists."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import tl_layersim as lsim


def public_names() -> dict[str, Any]:
    """What users import, by its name after `tl_layersim.`."""
    found = {name: getattr(lsim, name) for name in lsim.__all__}
    packages = {name: thing for name, thing in found.items() if isinstance(thing, ModuleType)}
    below = {f"{name}.{inner}": getattr(package, inner) for name, package in packages.items() for inner in package.__all__}
    return {name: thing for name, thing in found.items() if name not in packages} | below
