"""How the router of a mixture of experts weights a token's experts, and the names of the usual ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.plan import Gating, GluActivation


@dataclass(frozen=True, slots=True)
class ExpertGating:
    """How the router weights a token's experts; `plan.Experts` defines the gatings."""

    gating: Gating
    normalize: bool  # divide the selected weights by their sum
    # Whether metadata keys override the fields. True: they override `gating` and `normalize`, and may set a scale.
    # "gating": they override `gating` only. "scaled": they override `gating` and may set a scale.
    from_file: bool | Literal["gating", "scaled"] = False
    scales: bool = False  # apply `.scale` tensors of expert matrices
    activation: GluActivation = "silu"


SOFTMAX, SCALED_SOFTMAX = ExpertGating("softmax", True), ExpertGating("softmax", True, scales=True)
FILE_SOFTMAX = ExpertGating("softmax", False, from_file=True)
FILE_SIGMOID = ExpertGating("sigmoid", False, from_file=True)
SCALED_SIGMOID = ExpertGating("sigmoid", False, from_file=True, scales=True)
