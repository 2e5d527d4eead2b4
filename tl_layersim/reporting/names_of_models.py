"""Short names of the models of a run."""

from __future__ import annotations

from ..core.provenance import JOINT, Provenance
from .style import model_name


def names_of_models(provenance: Provenance) -> tuple[str, ...]:
    """The names of the models of a run, one name for models of the same.

    Args:
        provenance: of a result of the run.
    """
    return tuple(dict.fromkeys(model_name(name) for name in provenance.model.split(JOINT)))
