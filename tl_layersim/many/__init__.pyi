"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .coupling_graphs import plot_adjacency as plot_adjacency
from .relations import Relation as Relation
from .sweep import SweepError as SweepError
