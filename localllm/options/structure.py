"""The constraints that a request can set on its output: a schema, a grammar, tool calls, a reasoning budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.base.errors import LocalLLMError


class StructureError(LocalLLMError):
    """An invalid, too large, or unsupported schema or grammar."""


class NotFinished(StructureError):
    """The child process that compiles grammars was killed or got no CPU time. The grammar is not the cause.

    A temporary failure: the client may retry after `retry_after` seconds.
    """

    retry_after = 1


@dataclass(frozen=True, slots=True)
class Structure:
    """The required structure of the output. Exactly one field is set; `lark`, `gbnf` and `regex` are source texts."""

    schema: Mapping[str, Any] | None = None
    any_object: bool = False  # the output must be a JSON object of any shape
    gbnf: str = ""  # llama.cpp's grammar format
    lark: str = ""
    regex: str = ""


@dataclass(frozen=True, slots=True)
class ConstraintSpec:
    """The constraints on the output: a structure or calls of `tools`, and a reasoning budget."""

    structure: Structure | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True  # whether several calls are allowed
    reasoning_tokens: int | None = None
    forced: bool = True  # whether a call is required; otherwise calls are optional

    @property
    def free(self) -> bool:
        """Whether the output is unconstrained."""
        return self.structure is None and not self.tools and self.reasoning_tokens is None
