"""`analyze`, `compare` and `attach`: analyzers over data on one model or two; figures of single prompts; runs on servers."""

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
