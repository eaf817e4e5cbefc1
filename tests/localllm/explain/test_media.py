"""The explanation of an answer shows which tokens of the prompt are a picture, and no ids for them."""

from __future__ import annotations

import json
from dataclasses import replace

import localllm
from localllm.cli.commands.explain_view import _prompt
from localllm.explain.account import Account, measure_roofs
from localllm.explain.explanation import Explanation
from localllm.explain.facts import facts
from localllm.explain.page import page
from localllm.explain.recorder import AnswerRecorder
from localllm.generation.request import Finished
from localllm.models import MediaInput
from tests.localllm.generation.test_media import Pictures, request


def test_an_explanation_names_the_tokens_of_a_picture() -> None:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=256, media=MediaInput()) as model:
        assert model.plan is not None
        pictures, recorder = Pictures(model.plan.media, False, True), AnswerRecorder(model, 4)
        asked = replace(request([1, 2, pictures(1), 3], most=3), observer=recorder)
        with recorder.watching() as record:
            events = list(model.stepper.stream(asked))
        assert isinstance(events[-1], Finished)
        account = Account(record, model, measure_roofs(model), events[-1])
        it = Explanation("model", model.device, "", "", account, model.tokenizer)
        found, text, line = facts(it), page(it), _prompt(it).plain
    assert [token["id"] for token in found["prompt"]] == [1, 2, *[None] * 20, 3]
    assert {token["text"] for token in found["prompt"][2:22]} == {"<media>"}
    assert text.count("token of a picture or a sound") == 20
    assert line.count("<picture or sound: 20 tokens>") == 1
    first = record.prompt[2]
    assert first < 0
    assert str(first) not in json.dumps(found)
    assert str(first) not in text
