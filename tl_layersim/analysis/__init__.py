"""`analyze`, `compare` and `attach`: analyzers over data on one model or two; figures of single prompts; runs on servers.

Other packages may import from these modules:

* `api`: `analyze`, `opened_analysis`
* `engine`: `TITLES`, `Analysis`; `shard_run`: `ShardRun`; `shard_files`: `FIRST`, `MAIN`, `DataCounts`, `ShardPart`, `digest_of`,
  `read_part`; `merging`: `FirstStage`, `differing_entries`, `merged_first`, `merged_report`
* `model_groups`: `group_labels`; `score_relation`: `Relation`
* `report_assembly`: `record`, the provenance of a run, `refuse_empty`
* `shards`: `count_data`, `listed`; `site_plan`: `DEFAULT`
* `validation`: `choose_analyzers`, `shared_tokens`, `with_tokenizer`
"""

from .attach import Probe
from .coupling_across_models import plot_adjacency
from .detection import detection_by_layer
from .one_prompt_figures import PredictionGrid, TrajectoryPCA
from .one_prompt_jacobian_results import BlockJacobians, CouplingMatrices
from .score_relation import Relation
from .server_capabilities import Capabilities
from .submitted_run import RemoteRun
from .sweep_api import SweepError
from .tower_similarity_api import tower_similarity
from .zero_shot_api import zero_shot, zero_shot_classifier

__all__ = [
    "BlockJacobians",
    "Capabilities",
    "CouplingMatrices",
    "PredictionGrid",
    "Probe",
    "Relation",
    "RemoteRun",
    "SweepError",
    "TrajectoryPCA",
    "detection_by_layer",
    "plot_adjacency",
    "tower_similarity",
    "zero_shot",
    "zero_shot_classifier",
]
