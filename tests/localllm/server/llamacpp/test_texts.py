"""llama.cpp's /tokenize, /detokenize and /apply-template."""

from __future__ import annotations

from typing import Any

from localllm.server.turn import Turn
from tests.localllm.server.calls import call
from tests.localllm.server.scripted import ScriptedService


def post(path: str, body: Any) -> Any:
    response = call(ScriptedService(), path, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokenize() -> None:
    assert post("/tokenize", {"content": "ab"}) == {"tokens": [97, 98]}
    assert post("/tokenize", {"content": "ab", "add_special": True}) == {"tokens": [1, 97, 98]}
    assert post("/tokenize", {"content": "<s>"}) == {"tokens": [1]}
    assert post("/tokenize", {"content": "<s>", "parse_special": False}) == {"tokens": list(b"<s>")}
    assert post("/tokenize", {"content": [12, "ab"]}) == {"tokens": [12, 97, 98]}
    assert post("/tokenize", {}) == {"tokens": []}


def test_pieces_are_texts_or_bytes() -> None:
    found = post("/tokenize", {"content": "aá", "with_pieces": True})["tokens"]
    assert found == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}, {"id": 161, "piece": [161]}]


def test_detokenize() -> None:
    assert post("/detokenize", {"tokens": list("aá".encode())}) == {"content": "aá"}
    assert post("/detokenize", {"tokens": [195]}) == {"content": "\ufffd"}
    assert post("/detokenize", {}) == {"content": ""}


def test_apply_template() -> None:
    service = ScriptedService()
    body = {
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    response = call(service, "/apply-template", body)
    assert response.json().keys() == {"prompt"}
    assert response.json()["prompt"].startswith("<|system|>s <|user|>")
    turn = service.asked[-1]
    assert isinstance(turn, Turn)
    assert [tool["function"]["name"] for tool in turn.tools] == ["f"]
    assert turn.template_variables == {"enable_thinking": False, "add_generation_prompt": False}
    assert turn.thinking.enabled is False


def test_a_template_is_applied_to_the_messages_of_a_chat() -> None:
    """The body is read as for /v1/chat/completions, whose tests have the refusals."""
    response = call(ScriptedService(), "/apply-template", {"messages": [{"role": "robot", "content": "x"}]})
    assert response.status_code == 400
    assert "messages[0].role" in response.json()["error"]["message"]
