"""Each error has the documented status and type, in the format of the API that the path belongs to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from localllm.base.errors import LocalLLMError
from localllm.engine import ContextFull
from localllm.gguf.layout import GGUFError
from localllm.options import OptionError
from localllm.sandbox import ConfinedError
from localllm.server import errors
from localllm.server.errors import TABLE, refusal_of
from localllm.server.shapes import NAMES, shape_of


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.BadRequest("x"), 400, "invalid_request"),
        (OptionError("x"), 400, "invalid_request"),
        (LocalLLMError("x"), 400, "invalid_request"),
        (ContextFull("x"), 400, "context_length_exceeded"),
        (errors.PromptTooLong("x", 5, 4), 400, "context_length_exceeded"),
        (errors.Unauthorized("x"), 401, "authentication"),
        (errors.Forbidden("x"), 403, "permission"),
        (errors.UnknownModel("x"), 404, "not_found"),
        (errors.TooSlow("x"), 408, "timeout"),
        (errors.TooLarge("x"), 413, "too_large"),
        (errors.TooManyRequests("x"), 429, "rate_limit"),
        (errors.NotSupported("x"), 501, "unsupported"),
        (errors.Loading("x"), 503, "unavailable"),
        (errors.Draining("x"), 503, "unavailable"),
        (errors.Unavailable("x"), 503, "unavailable"),
        (ConfinedError("x"), 503, "unavailable"),
    ],
)
def test_the_table(error: Exception, status: int, kind: str) -> None:
    refusal = refusal_of(error)
    assert (refusal.status, refusal.kind, refusal.message) == (status, kind, "x")


def test_a_file_that_cannot_be_read_is_not_the_clients_fault() -> None:
    refusal = refusal_of(GGUFError(Path("m.gguf"), "magic", "is wrong"))
    assert (refusal.status, refusal.kind) == (500, "internal")


def test_every_error_of_the_server_is_in_the_table() -> None:
    own = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, LocalLLMError)}
    listed = {kind for kind, _, _ in TABLE}
    missing = {each.__name__ for each in own if not any(issubclass(each, kind) for kind in listed - {LocalLLMError})}
    assert missing == {"LocalLLMError", "_Later"}


def test_unexpected_errors_are_logged_and_tell_the_client_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "localllm.server"):
        refusal = refusal_of(ZeroDivisionError("the secret path /home/x"))
    assert (refusal.status, refusal.kind) == (500, "internal")
    assert "secret" not in refusal.message
    assert "the secret path" in caplog.text


def test_messages_are_one_line_of_limited_length() -> None:
    refusal = refusal_of(errors.BadRequest("a\n\x1b[31mb" + "x" * 100_000))
    assert refusal.message.startswith("a\\n\\x1b[31mb")
    assert len(refusal.message) < 2100


def test_headers() -> None:
    assert refusal_of(errors.Draining("x", 7)).headers == {"Retry-After": "7"}
    assert refusal_of(errors.TooManyRequests("x")).headers == {"Retry-After": "1"}
    assert refusal_of(errors.Unauthorized("x")).headers == {"WWW-Authenticate": "Bearer"}
    assert refusal_of(errors.BadRequest("x")).headers == {}
    assert refusal_of(errors.NotSupported("x")).headers == {"X-Should-Retry": "false"}


@pytest.mark.parametrize(
    ("path", "like"),
    [
        ("/v1/messages/count_tokens", "/v1/messages"),
        ("/v1/responses", "/v1/models"),
        ("/chat/completions", "/v1/models"),
        ("/models", "/v1/models"),
        ("/api/", "/api/tags"),
        ("/props", "/completion"),
        ("/", "/completion"),
        ("", "/completion"),
        ("/nowhere", "/completion"),
    ],
)
def test_the_path_chooses(path: str, like: str) -> None:
    assert shape_of(path) is shape_of(like)


def test_every_kind_has_a_name_in_every_protocol() -> None:
    assert {kind for _, _, kind in TABLE} == set(NAMES)
