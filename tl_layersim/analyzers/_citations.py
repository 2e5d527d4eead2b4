"""Citations in the explanations of figures, with the place in the paper left open."""

JIANG = "(Jiang, Zhou and Zhu 2024, {})."
AUBRY = "(Aubry et al. 2025, {})."
