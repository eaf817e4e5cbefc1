"""Prompts of MiniMax M3 and DeepSeek 3.2, equal to llama-server's (2026-10-01) for the same templates.

prompts.json holds the requests and llama-server's prompts, made with the bundled model:

    llama-server -m localllm/models/demo/demo.gguf --jinja --chat-template-file ../shared/data/templates/NAME.jinja
    curl -d REQUEST http://127.0.0.1:8080/apply-template
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from localllm.server.catalogue import only
from localllm.server.registry import ModelRegistry
from localllm.server.served import Served
from localllm.template import given_template
from tests.conftest import reference
from tests.localllm.server.whole import DEMO, client, opened

STORED: dict[str, Any] = json.loads(Path(__file__).with_name("prompts.json").read_text(encoding="utf-8"))
START = "<|endoftext|>"  # BOS, which llama-server leaves to the tokenizer
FAMILIES = sorted({name.split()[0] for name in STORED["prompts"]})


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_those_of_llama_server(family: str) -> None:
    source = str(reference("templates", f"{family}.jinja"))

    def load(path: Path) -> Served:
        served = opened(path)
        served.model.use_template(given_template(source))
        return served

    async def run() -> None:
        async with client(ModelRegistry(only("demo", DEMO), load)) as http:
            await http.post("/tokenize", json={"content": "x"})  # this request loads the model
            for case, request in STORED["requests"].items():
                answer = await http.post("/apply-template", json=request)
                prompt = answer.json()["prompt"].removeprefix(START)
                assert prompt == STORED["prompts"][f"{family} {case}"], case

    asyncio.run(run())
