"""The settings of a server, as its parts take them."""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.server.limits import Limits


@dataclass(frozen=True, slots=True)
class Settings:
    """How the server answers, apart from models."""

    limits: Limits = field(default_factory=Limits)
