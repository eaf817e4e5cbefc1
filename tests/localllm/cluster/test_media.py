"""Pictures through stages: the first stage takes their embeddings, and sends the streams that later stages add."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import localllm
from localllm.backends.base import Backend
from localllm.cluster.errors import MessageError
from localllm.cluster.ring import Connect
from localllm.cluster.wire import batch_arrays, batch_of, batch_parts
from localllm.models import MediaInput
from localllm.plan import Batch
from tests.localllm.cluster.crowd import split
from tests.localllm.cluster.faults import Faults
from tests.localllm.generation.support import ask, scheduled
from tests.localllm.generation.test_media import MODELS, Pictures, alone, prompt_of, request
from tests.models.kit import KIT

# Two streams of deepstack: the second one is added behind a layer of the second stage.
STAGED = {"qwen3vl-dense": MediaInput(streams=3), "gemma3-12": MODELS["gemma3-12"], "qwen35-mtp": MODELS["qwen35-mtp"]}


def pictures_of(model: localllm.Model) -> Pictures:
    assert model.plan is not None
    return Pictures(model.plan.media, model.plan.axes > 0, not model.plan.spans)


@pytest.mark.parametrize(("family", "media"), STAGED.items(), ids=str)
def test_stages_answer_with_the_same_bits_even_after_a_loss(
    family: str, media: MediaInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.cluster.executable.MICRO_ROWS", 8)  # divides batches without spans
    path = KIT[family].write(tmp_path / "model.gguf")
    with localllm.load(path, backend="cpu", threads=1, ctx_size=256, sequences=4, media=media) as model:
        pictures = pictures_of(model)
        prompts = [prompt_of(pictures, *seeds) for seeds in ([1, 2], [1, 3], [4])]
        truth = [alone(model, prompt)[0] for prompt in prompts]
    found: list[Faults] = []

    def connecting(backend: Backend, stages: int) -> Connect:
        found.append(Faults(backend))
        return found[0].connect

    with split(path, 2, connecting, ctx_size=256, sequences=4, media=media) as model:
        [faults] = found
        faults.first = [model.executable._first]  # type: ignore[attr-defined]
        for fatal in (None, 3, 12):
            faults.messages, faults.fatal = 0, set() if fatal is None else {fatal}
            with scheduled(model) as scheduler:
                answers = [ask(scheduler, request(prompt)) for prompt in prompts]
                for answer in answers:
                    answer.result()
            assert [answer.tokens for answer in answers] == truth
        assert faults.connections == 3
    faults.close()


def batch(**further: np.ndarray) -> Batch:
    numbers = np.arange(3, dtype=np.int32)
    return Batch(numbers, numbers, numbers, numbers, numbers[None], numbers, **further)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [[], ["axes"], ["span_ends"], ["axes", "span_ends"]])
def test_batches_keep_their_axes_and_spans(names: list[str]) -> None:
    arrays = {"axes": np.ones((3, 4), np.int32), "span_ends": np.full(3, 2, np.int32)}
    sent = batch(**{name: arrays[name] for name in names})
    made, rest = batch_of((*batch_arrays(sent), np.zeros(1, np.float32)), batch_parts(sent))
    assert len(rest) == 1
    for name, array in arrays.items():
        assert (getattr(made, name) is not None) == (name in names)
        if name in names:
            np.testing.assert_array_equal(getattr(made, name), array)
    with pytest.raises(MessageError):
        batch_of(batch_arrays(sent), 8)
    with pytest.raises(MessageError):
        batch_of(batch_arrays(sent), batch_parts(sent) | 1)
