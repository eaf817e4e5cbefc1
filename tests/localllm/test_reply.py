"""Replies that several threads, tasks and functions use: read concurrently, closed by others, formatted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import localllm
from localllm.base.errors import LocalLLMError
from localllm.generation.interfaces import SchedulerLimits

PROMPT = "Once upon a time"
LONG = 4000  # tokens; generating them takes longer than any test


@pytest.fixture(scope="module")
def model() -> Iterator[localllm.Model]:
    with localllm.load("demo", backend="cpu", threads=1, ctx_size=LONG + 96) as opened:
        yield opened


@pytest.fixture(autouse=True)
def all_free(model: localllm.Model) -> Iterator[None]:
    """Check that the test leaves no request, and no KV cache blocks except in the prefix cache."""
    model.new_core(SchedulerLimits())
    before = model.engine.free_blocks
    yield
    model.stepper.run(lambda: None)
    running = model.stepper.core.running
    assert running.active == running.waiting == []
    running.prefixes.clear()
    assert model.engine.free_blocks == before


def begin(model: localllm.Model, count: int = LONG, **more: Any) -> localllm.Reply:
    return model.generate(PROMPT, max_tokens=count, temperature=0, ignore_eos=True, **more)


def test_threads_that_read_one_reply_share_its_pieces(model: localllm.Model) -> None:
    expected, reply = begin(model, 40).tokens, begin(model, 40)
    found, errors = list[localllm.Piece](), list[BaseException]()

    def read() -> None:
        try:
            for piece in reply:
                found.append(piece)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert reply.tokens == expected
    assert sorted(piece.token for piece in found if piece.token is not None) == sorted(expected)


def test_a_reply_is_closed_while_another_thread_reads_it(model: localllm.Model) -> None:
    reply, begun, found = begin(model), threading.Event(), list[Any]()

    def read() -> None:
        next(reply)
        begun.set()
        try:
            found.append(reply.tokens)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    reply.close()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(found[0], list), found
    assert len(found[0]) < LONG // 2
    assert reply.finish_reason == "cancelled"
    with pytest.raises(LocalLLMError, match="closed before its end"):
        _ = reply.usage


def test_a_logits_processor_may_close_its_own_reply_but_not_read_it(model: localllm.Model) -> None:
    replies = list[localllm.Reply]()

    def close(tokens: Any, logits: Any) -> Any:
        replies[0].close()
        return logits

    def read(tokens: Any, logits: Any) -> Any:
        next(replies[1])
        return logits

    replies += [begin(model, logits_processor=close), begin(model, logits_processor=read)]
    assert len(replies[0].tokens) <= 2
    with pytest.raises(LocalLLMError, match="cannot"):
        replies[1].wait()


@pytest.mark.parametrize("way", ["await", "async for", "wait_for"])
def test_a_cancelled_task_ends_its_answer(model: localllm.Model, way: str) -> None:
    reply = begin(model)

    async def read() -> None:
        if way == "async for":
            async for _ in reply:
                pass
        else:
            await reply

    async def main() -> None:
        if way == "wait_for":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(read(), 0.02)
            return
        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())  # ends only when the reading thread ends
    assert reply.finish_reason == "cancelled"
    assert len(reply.tokens) < LONG // 2


def test_a_reply_is_formatted_as_its_text(model: localllm.Model) -> None:
    reply = begin(model, 3)
    assert f"{reply:>80}" == f"{reply.text:>80}"


def test_prompts_may_come_from_a_generator(model: localllm.Model) -> None:
    prompts = ["The dog", PROMPT]
    given: Any = (text for text in prompts)
    replies: Any = model.generate(given, max_tokens=5, temperature=0)
    assert [str(reply) for reply in replies] == [
        str(model.generate(text, max_tokens=5, temperature=0)) for text in prompts
    ]


def test_bytes_are_no_prompt(model: localllm.Model) -> None:
    given: Any = b"Hello"
    with pytest.raises(LocalLLMError, match="a text or token ids"):
        model.generate(given)


@pytest.mark.parametrize("said", [None, 3, [{"role": "user", "content": "x"}]])
def test_a_conversation_takes_texts_only(model: localllm.Model, said: Any) -> None:
    with pytest.raises(LocalLLMError, match="expects a text"):
        model.conversation().say(said)


@pytest.mark.parametrize("token", [-5, 10**9, 2**70])
def test_a_token_outside_the_vocabulary_ends_no_other_answer(model: localllm.Model, token: int) -> None:
    expected, other = begin(model, 5).tokens, begin(model, 5)
    with pytest.raises(LocalLLMError, match="outside the vocabulary"):
        model.generate([5, token], max_tokens=5).wait()
    assert other.tokens == expected


def test_a_closed_model_renders_no_prompt() -> None:
    model = localllm.load("demo", threads=1, ctx_size=64)
    assert model.apply_chat_template("Hello!")
    model.close()
    with pytest.raises(LocalLLMError, match="this model is closed"):
        model.apply_chat_template("Hello!")


def test_the_next_turn_closes_a_reply_that_is_not_read_to_its_end(model: localllm.Model) -> None:
    """A new turn closes an older reply that was not read. Reading that reply must not replace the messages of newer
    turns.
    """
    talk = model.conversation(max_tokens=20, temperature=0, ignore_eos=True)
    unread, first = talk.say("One"), talk.say("Two")
    begun = next(first).text + next(first).text
    second = talk.say("Three").text
    assert (unread.text, first.text) == ("", begun)
    assert [message["content"] for message in talk.messages] == ["Two", begun, "Three", second]


@pytest.mark.parametrize("left", [float("-inf"), float("nan")])
def test_a_logits_processor_that_leaves_no_token_is_named(model: localllm.Model, left: float) -> None:
    def processor(tokens: Any, logits: Any) -> Any:
        return 0 * logits + left

    with pytest.raises(LocalLLMError, match="the logits processor leaves no token to choose"):
        begin(model, 5, logits_processor=processor).wait()


@pytest.mark.parametrize("tools", [[3], {"a": 3}, "weather", [{"a": 3}], [{"type": "function", "function": {}}]])
def test_tools_that_are_no_functions_are_refused_with_an_example(model: localllm.Model, tools: Any) -> None:
    with pytest.raises(LocalLLMError, match="tools are a list of functions such as"):
        model.chat("Hello!", tools=tools, max_tokens=1)
