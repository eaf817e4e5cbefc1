"""A row of the architecture table: its properties, how its keys are read, and the classes that record its models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localllm.models.attention import Attention
from localllm.models.config import Config
from localllm.models.feed_forward import FeedForward
from localllm.models.indexer import Selector
from localllm.models.layers import LayerRecorder
from localllm.models.output import Output
from localllm.models.properties import Properties
from localllm.models.reading.config import read_general
from localllm.models.reading.keys import Keys
from localllm.models.recurrent import Recurrence

# what families need to write a row: the row itself, and the classes that they replace by subclasses
__all__ = ["Architecture", "Attention", "FeedForward", "LayerRecorder", "Output", "Recurrence", "Selector"]


@dataclass(frozen=True, slots=True)
class Architecture(Properties):
    """One architecture. The defaults of the fields below make a plain transformer of the properties; a family that
    needs more replaces a function, or a class by a subclass.
    """

    # (keys, properties, number of multi-token-prediction heads to count as layers) -> configuration
    read: Callable[[Keys, Properties, int], Config] = read_general
    layers: type[LayerRecorder] = LayerRecorder
    attention: type[Attention] = Attention
    selector: type[Selector] = Selector
    recurrence: type[Recurrence] = Recurrence
    feed_forward: type[FeedForward] = FeedForward
    output: type[Output] = Output
    heads_verified: bool = True  # False: no reference runs the multi-token-prediction heads, so they cannot be verified
