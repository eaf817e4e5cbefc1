"""The option declarations: name, type, default, unit, help, flags and allowed values of every option.

Importing this package is quick.

May import: base.
Begin with: declare.py, then load.py and sampling.py; structure.py and thinking.py hold the structural and reasoning
options of a request.
"""

from __future__ import annotations

from localllm.options.answer import AnswerOptions
from localllm.options.declare import DeclaredOption, Option, Options, declared, group, option, same
from localllm.options.diffusion import DiffusionOptions
from localllm.options.kinds import OptionError
from localllm.options.load import LoadOptions
from localllm.options.ray import RayOptions
from localllm.options.sampling import SamplingOptions
from localllm.options.serve import ServeOptions
from localllm.options.speculation import SpeculationOptions

__all__ = [
    "AnswerOptions",
    "DeclaredOption",
    "DiffusionOptions",
    "LoadOptions",
    "Option",
    "OptionError",
    "Options",
    "RayOptions",
    "SamplingOptions",
    "ServeOptions",
    "SpeculationOptions",
    "declared",
    "group",
    "option",
    "same",
]
