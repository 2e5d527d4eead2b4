"""Short names of the models of a run."""

from __future__ import annotations

from pathlib import Path

from ..core.provenance import JOINT, Provenance


def names_of_models(provenance: Provenance) -> tuple[str, ...]:
    """The names of the models of a run, each without its folders; one name for models of the same.

    Args:
        provenance: of a result of the run.
    """
    return tuple(dict.fromkeys(Path(name).name or name for name in provenance.model.split(JOINT)))
