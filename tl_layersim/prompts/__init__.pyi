"""The names that users import from here, each with its module; `__init__.py` reads them from here."""

from .figures import PredictionGrid as PredictionGrid
from .figures import TrajectoryPCA as TrajectoryPCA
from .figures import prediction_grid as prediction_grid
from .figures import trajectory_pca as trajectory_pca
from .jacobians import BlockJacobians as BlockJacobians
from .jacobians import CouplingMatrices as CouplingMatrices
from .jacobians import block_jacobians as block_jacobians
from .jacobians import coupling_matrices as coupling_matrices
