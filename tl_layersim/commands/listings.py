"""`tl-layersim analyzers` and `tl-layersim sites`: what can be measured, and where."""

from __future__ import annotations

from . import options as o
from .inputs import ALIGNED, is_demo
from .tables import print_table


def list_analyzers() -> None:
    """List the installed analyzers, with one line on each."""
    from .. import find_analyzers

    installed = sorted(find_analyzers().items())
    print_table(("name", "measure"), [(name, cls.summary()) for name, cls in installed], "Analyzers")


def list_sites(model: o.ModelArgument = "demo", trust_remote_code: o.TrustOption = False) -> None:
    """List the sites of a model, which --at selects."""
    from .. import demo_model, sites
    from ..models.named_model import load_without_weights

    known = demo_model(aligned=model == ALIGNED) if is_demo(model) else load_without_weights(model, trust_remote_code, "MODEL")
    table = sites(known)
    rows = table.astype(object).where(table.notna(), "-").astype(str).to_numpy().tolist()
    print_table(list(table.columns), rows, "Sites in the order in which the model computes them", numbers=("block", "heads"))
