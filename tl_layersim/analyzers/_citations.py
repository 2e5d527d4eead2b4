"""Format strings for citations in the explanations of figures, to be filled with a place such as "figure 5"."""

JIANG = "(Jiang, Zhou and Zhu 2024, {})."
AUBRY = "(Aubry et al. 2025, {})."
CSORDAS = "(Csordás, Manning and Potts 2025, {})."
