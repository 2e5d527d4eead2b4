"""analyze, compare and attach: analyzers over data on models; single prompts; runs on servers that are not waited for."""

from .attach import Probe
from .capabilities import Capabilities
from .one_prompt import PredictionGrid, TrajectoryPCA
from .one_prompt_jacobians import BlockJacobians, CouplingMatrices
from .regression import Relation
from .remote_run import RemoteRun

__all__ = [
    "BlockJacobians",
    "Capabilities",
    "CouplingMatrices",
    "PredictionGrid",
    "Probe",
    "Relation",
    "RemoteRun",
    "TrajectoryPCA",
]
