"""Naive float64 NumPy, written from the formulas and from nothing else. `oracle_<name>` gives every field of an analyzer.

`batches` is a list of `layer token d_model`; loops are meant.
"""

from __future__ import annotations

from .block_coupling import alignment, coupling_matrix, miscoupling, oracle_block_coupling, own_jacobian, random_frames
from .cka import arccos_distance, cka_by_tuples, hsic_0, hsic_1, hsic_by_tuples, hsic_of_rows, oracle_cka, rbf_cka
from .common import HEAD, LEVELS, WORDS, cosine_of, layer_norm, lens_by_token, next_of, no_null, say, softmax, tokens_of
from .contribution import oracle_contribution, sublayer_outputs
from .cosine import oracle_cosine
from .cross_products import in_sample_r2, oracle_cca, oracle_linear_predictivity, oracle_procrustes, permutation_similarity
from .effective_rank import oracle_effective_rank
from .exchanged_texts import exchanged_values, p_value, positions_in_common
from .exit_curve import oracle_exit_curve
from .intervention_effect import effect, oracle_intervention_effect
from .linear_probe import ROWS_OF, held_out_rows, oracle_linear_probe, ridge_scores
from .logit_attribution import oracle_logit_attribution
from .logit_lens import oracle_logit_lens
from .neural_collapse import oracle_neural_collapse
from .rsa import cknna, cycle_knn, jaccard_of_neighbours, neighbours, oracle_mutual_knn, oracle_rsa
from .saturation import oracle_saturation
from .similarity import kernel_alignment, oracle_similarity
from .skip_effect import oracle_skip_effect
from .task_metrics import classification_metrics, oracle_task_metrics
from .trajectory import line_shape_score, oracle_trajectory, turning_angles
