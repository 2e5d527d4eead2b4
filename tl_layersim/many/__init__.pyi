"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .coupling_graphs import plot_adjacency as plot_adjacency
from .exponential_fits import exponential_fit as exponential_fit
from .model_groups import compare_groups as compare_groups
from .model_groups import dendrogram as dendrogram
from .relations import Relation as Relation
from .relations import relate as relate
from .sweep import SweepError as SweepError
