"""`analyze`, `compare` and `attach`: analyzers over data on one model or two; figures of single prompts; runs on servers.

Other packages may import from these modules:

* `api`: `analyze`
* `group_curves`: `GroupCurves`, `group_curves`
* `model_groups`: `chosen_groups`, `group_labels`
* `model_matrix`: `ModelMatrix`
* `report_assembly`: `record`, the provenance of a run
* `validation`: `shared_tokens`, `with_tokenizer`
"""

from .attach import Probe
from .coupling_across_models import Relation
from .one_prompt_figures import PredictionGrid, TrajectoryPCA
from .one_prompt_jacobian_results import BlockJacobians, CouplingMatrices
from .server_capabilities import Capabilities
from .submitted_run import RemoteRun

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
