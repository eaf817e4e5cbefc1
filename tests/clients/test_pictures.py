"""Pictures and sound from the packages `openai`, `anthropic` and `ollama`: answers are the same as over plain HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import Server, serving
from tests.localllm.media_models import data_url, png, wav, write_pair

PICTURE, SOUND = png(seed=5), wav(3200)
MOST = 8  # tokens of an answer
BASE64 = base64.b64encode(PICTURE).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pictures")
    with serving(folder, str(write_pair(folder)), program="localllm") as it:
        yield it


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("sounds")
    with serving(folder, str(write_pair(folder, "gemma4ua")), "-n", str(MOST), program="localllm") as it:
        yield it


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat() -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(PICTURE)}}, {"type": "text", "text": "what?"}]
    return {
        "model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": MOST, "temperature": 0,
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    """The answer by plain HTTP. The picture changes it."""
    answer = post(server, "/v1/chat/completions", chat())
    alone = chat()
    alone["messages"][0]["content"] = "what?"
    without = post(server, "/v1/chat/completions", alone)
    assert answer["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"] + 10
    text = str(answer["choices"][0]["message"]["content"])
    assert text != without["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat(server: Server, expected: str, stream: bool) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.chat.completions.create(**chat(), stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        else:
            text = answer.choices[0].message.content
    assert text == expected


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(server: Server, expected: str, stream: bool) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    parts: Any = [{"type": "input_image", "image_url": data_url(PICTURE)}, {"type": "input_text", "text": "what?"}]
    asked = {"model": "tiny", "input": [{"role": "user", "content": parts}], "max_output_tokens": MOST}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        if stream:
            with client.responses.stream(**asked, temperature=0) as events:
                text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        else:
            text = client.responses.create(**asked, temperature=0).output_text
    assert text == expected


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(server: Server, expected: str, stream: bool) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    parts: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]
    asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": MOST}
    asked["temperature"] = 0
    plain = "".join(each["text"] for each in post(server, "/v1/messages", asked)["content"])
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        if stream:
            with client.messages.stream(**_without_temperature(asked)) as events:
                text = "".join(events.text_stream)
        else:
            text = "".join(block.text for block in client.messages.create(**_without_temperature(asked)).content)
    assert text == plain == expected


def _without_temperature(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the request for versions of the package that pass the temperature only in `extra_body`."""
    return {key: value for key, value in asked.items() if key != "temperature"} | {"extra_body": {"temperature": 0}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("source", [PICTURE, BASE64], ids=["bytes", "base64"])
def test_ollama(server: Server, expected: str, source: Any, stream: bool) -> None:
    ollama = pytest.importorskip("ollama", reason="the ollama package is not installed")
    client = ollama.Client(host=server.url, timeout=60)
    message: Any = {"role": "user", "content": "what?", "images": [source]}
    asked: Any = {"model": "tiny", "messages": [message], "options": {"num_predict": MOST, "temperature": 0}}
    answers = client.chat(**asked, stream=True) if stream else [client.chat(**asked)]
    assert "".join(answer.message.content or "" for answer in answers) == expected


def test_transcriptions(hearing: Server) -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    plain = httpx.post(
        f"{hearing.url}/v1/audio/transcriptions", files={"file": ("a.wav", SOUND, "audio/wav")},
        data={"model": "tiny", "language": "de", "temperature": "0"}, timeout=60,
    )  # fmt: skip
    assert plain.status_code == 200, plain.text
    with openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        found = client.audio.transcriptions.create(
            file=("a.wav", SOUND), model="tiny", language="de", temperature=0
        )  # fmt: skip
        text = client.audio.transcriptions.create(
            file=("a.wav", SOUND), model="tiny", language="de", temperature=0, response_format="text"
        )  # fmt: skip
    assert found.text == plain.json()["text"] != ""
    assert text == found.text + "\n"
