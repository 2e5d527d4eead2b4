"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .figures import PredictionGrid as PredictionGrid
from .figures import TrajectoryPCA as TrajectoryPCA
from .jacobians import BlockJacobians as BlockJacobians
from .jacobians import CouplingMatrices as CouplingMatrices
