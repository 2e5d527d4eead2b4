"""Names of quantities and axes in words, with units, as figures show them."""

from __future__ import annotations

# By class and field where a field's name has several meanings, else by field.
QUANTITIES = {
    "CosineResult.values": "Cosine similarity",
    "CKAResult.values": "Linear CKA",
    "TowerSimilarity.values": "Cosine similarity",
    "TowerSimilarity.std": "Standard deviation of the cosine",
    "TowerSimilarity.vision": "Cosine similarity",
    "TowerSimilarity.text": "Cosine similarity",
    "ExitCurveResult.exits": "Positions",
    "ContributionResult.cosine": "Cosine similarity",
    "ContributionResult.cosine_std": "Standard deviation of the cosine",
    "SkipEffectResult.values": "Relative change",
    "DetectionResult.loss": "Loss (weighted sum)",
    "CosineResult.std": "Standard deviation of the cosine",
    "LinearProbeResult.accuracy": "Accuracy on held-out samples (fraction)",
    "LinearProbeResult.train_accuracy": "Accuracy on training samples (fraction)",
    "BlockCouplingResult.std": "Standard deviation of the mis-coupling",
    "accuracy": "Accuracy (fraction)",
    "adjacent": "Cosine similarity",
    "agreement": "Agreement (fraction)",
    "below_zero": "Tokens with a negative cosine (fraction)",
    "between": "Variance between classes",
    "box_l1": "Box L1 (fraction of the image)",
    "by_k": "Mis-coupling",
    "by_length": "Coupling",
    "cka": "Linear CKA",
    "coherence": "Cosine similarity",
    "column_effective_samples": "Effective samples",
    "cosine_to_last": "Cosine similarity",
    "cosine_to_final": "Cosine similarity",
    "cosine_to_final_std": "Standard deviation of the cosine",
    "counts": "Tokens",
    "coupling": "Coupling",
    "cross_entropy": "Cross-entropy (nats)",
    "cumulative": "Tokens (fraction)",
    "curve": "Loss (nats)",
    "diversity": "Diversity (0 to 1)",
    "effective_samples": "Effective samples",
    "entropy": "Entropy (nats)",
    "f1": "Macro F1 (0 to 1)",
    "f1_by_class": "F1 (0 to 1)",
    "equidistance_quantiles": "Equidistance",
    "exits": "Positions (fraction)",
    "expodistance_quantiles": "Expodistance",
    "giou": "Generalised IoU",
    "growth": "Growth of the norm (log ratio)",
    "held_out_loss": "Cross-entropy (nats)",
    "kl_to_final": "KL divergence (nats)",
    "largest": "Relative change (largest in a row)",
    "later": "Relative change",
    "later_largest": "Relative change (largest in a row)",
    "later_probability_change": "Change of the probabilities (norm)",
    "later_probability_change_largest": "Change of the probabilities (largest norm in a row)",
    "loss": "Loss (nats)",
    "losses": "Cross-entropy (nats)",
    "lss_quantiles": "Line-shape score",
    "mcc": "Matthews correlation",
    "miscoupling": "Mis-coupling",
    "nc1": "NC1",
    "mismatched": "Cosine similarity",
    "no_object": "Queries (fraction)",
    "norm": "Norm of the residual",
    "norm_quantiles": "Norm of the residual",
    "norm_ratio": "Norm of the stream / norm of the update",
    "norm_std": "Standard deviation of the norm",
    "null": "Mis-coupling of random vectors",
    "null_by_k": "Mis-coupling of random vectors",
    "pearson": "Pearson correlation",
    "perplexity": "Perplexity",
    "probability_change": "Change of the probabilities (norm)",
    "probability_change_largest": "Change of the probabilities (largest norm in a row)",
    "relative_norm": "Norm of the output / norm of the stream",
    "relative_norm_std": "Standard deviation of the relative norm",
    "saturated": "Positions (fraction)",
    "singular_values": "Singular value",
    "singular_values_std": "Standard deviation of the singular value",
    "spearman": "Spearman correlation",
    "speedup": "Blocks of the model / blocks run",
    "target_probability": "Probability",
    "text_to_last": "Cosine similarity",
    "to_last": "Cosine similarity",
    "top_k_accuracy": "Accuracy (fraction)",
    "update_norm": "Norm of the update",
    "update_norm_quantiles": "Norm of the update",
    "update_norm_std": "Standard deviation of the norm",
    "windowed_lss": "Line-shape score",
    "vision_to_last": "Cosine similarity",
    "within": "Variance within classes",
}
AXES = {
    "affected": "Affected block",
    "batch": "Batch",
    "centre": "After block",
    "direction": "Number of the singular value",
    "label": "Class",
    "layer": "Block",
    "length": "Prompt length (tokens)",
    "look": "Evaluation",
    "other_text_layer": "After block of the text tower",
    "other_vision_layer": "After block of the vision tower",
    "prediction": "Predicted class",
    "residual": "After block",
    "skipped": "Skipped block",
    "step": "Training step",
    "text_layer": "After block of the text tower",
    "threshold": "Threshold of the top probability",
    "vision_layer": "After block of the vision tower",
}


def quantity(result_class: str, field: str) -> str:
    """A field in words, with its unit; of a field that is not listed, its name as words.

    Examples:
        >>> quantity("LogitLensResult", "cross_entropy"), quantity("OwnResult", "mean_margin")
        ('Cross-entropy (nats)', 'Mean margin')
    """
    return QUANTITIES.get(f"{result_class}.{field}") or QUANTITIES.get(field) or _words(field)


def axis_title(axis: str) -> str:
    """An axis in words, with its unit.

    Examples:
        >>> axis_title("length"), axis_title("head_number")
        ('Prompt length (tokens)', 'Head number')
    """
    return AXES.get(axis) or _words(axis)


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()
