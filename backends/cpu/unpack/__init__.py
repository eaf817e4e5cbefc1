"""Unpacks the blocks of weight formats in registers. `INTEGER_PANELS` and `FLOAT_PANELS` have one row per format."""

from __future__ import annotations

from localllm.backends.cpu.panels import Activations, FloatPanel, IntegerPanel
from localllm.backends.cpu.simd import F32, vector
from localllm.backends.cpu.unpack import codebook, iq1, k_quants, legacy, nonlinear, small

INTEGER_PANELS: dict[str, IntegerPanel] = {
    panel.name: panel
    for panel in (
        legacy.Q4_0,
        legacy.Q4_1,
        legacy.Q5_0,
        legacy.Q5_1,
        legacy.Q8_0,
        k_quants.Q2_K,
        k_quants.Q3_K,
        k_quants.Q4_K,
        k_quants.Q5_K,
        k_quants.Q6_K,
        nonlinear.IQ4_NL,
        nonlinear.IQ4_XS,
        nonlinear.MXFP4,
        small.NVFP4,
        iq1.IQ1_S,
        iq1.IQ1_M,
        codebook.IQ2_XXS,
        codebook.IQ2_XS,
        codebook.IQ2_S,
        codebook.IQ3_XXS,
        codebook.IQ3_S,
        small.TQ1_0,
        small.TQ2_0,
        small.Q1_0,
        small.Q2_0,
    )
}
FLOAT_PANELS: dict[str, FloatPanel] = {
    panel.name: panel
    for panel in (
        FloatPanel("F32", 4, lambda f, p, lanes: f.load(p, vector(F32, lanes))),
        FloatPanel("F16", 2, lambda f, p, lanes: f.load_half(p, lanes)),
        FloatPanel("BF16", 2, lambda f, p, lanes: f.load_bfloat(p, lanes), Activations.BFLOATS),
    )
}
FORMATS = (*FLOAT_PANELS, *INTEGER_PANELS)


def activations_of(name: str) -> Activations | None:
    """Return the activations that products with a format read: None for float32, and for a format without kernels."""
    panel = INTEGER_PANELS.get(name) or FLOAT_PANELS.get(name)
    return panel.activations if panel is not None else None


def panel_of(name: str) -> IntegerPanel | FloatPanel:
    """Return the panel description of a format. Raises KeyError for a format without kernels."""
    return INTEGER_PANELS.get(name) or FLOAT_PANELS[name]
