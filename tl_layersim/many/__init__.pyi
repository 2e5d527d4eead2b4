"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .fits import Relation as Relation
from .fits import exponential_fit as exponential_fit
from .fits import relate as relate
from .group_comparison import compare_groups as compare_groups
from .group_comparison import dendrogram as dendrogram
from .plot import plot_adjacency as plot_adjacency
from .sweep import SweepError as SweepError
