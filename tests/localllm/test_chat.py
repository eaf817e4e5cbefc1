"""The conversation behind `chat`: which tokens a turn evaluates and keeps, and how a full context is handled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import localllm as api
from localllm.base.errors import LocalLLMError
from localllm.chat import Conversation, template_of
from localllm.engine import ContextFull
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.statistics import Usage
from localllm.options import AnswerOptions
from localllm.reply import Reply
from localllm.template import ChatTemplate
from tests.localllm.support import write_model

GREEDY = api.SamplingOptions(temperature=0.0, frequency_penalty=0.5, repeat_last_n=1000)


class Script:
    """A sampler that produces scripted answers, one after another."""

    required_top_k, options = 0, GREEDY

    def __init__(self, *answers: Sequence[int]) -> None:
        self.tokens = [token for answer in answers for token in answer]

    def sample(self, logits: np.ndarray) -> int:
        return self.tokens.pop(0)

    finished = False

    def accept(self, token: int) -> None: ...
    def write(self, token: int) -> None: ...
    def constrain(self, constraint: object, ends: Collection[int], ignore_eos: bool) -> None:
        self.ends = ends

    def is_end(self, token: int) -> bool:
        return token in self.ends

    def begin(self) -> None: ...


@pytest.fixture(scope="module")
def opened_demo() -> Iterator[api.Model]:
    with api.load("demo", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def opened_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[api.Model]:
    with api.load(write_model(tmp_path_factory.mktemp("m") / "m.gguf"), ctx_size=128, threads=1) as opened:
        yield opened


@pytest.fixture
def demo(opened_demo: api.Model) -> Iterator[api.Model]:
    yield opened_demo
    empty(opened_demo)


@pytest.fixture
def tiny(opened_tiny: api.Model) -> Iterator[api.Model]:
    """Provide a model with a context of 128 tokens, in which every letter is a token."""
    yield opened_tiny
    empty(opened_tiny)


def empty(model: api.Model) -> None:
    """Empty the model's KV cache. Conversations hold no blocks, so every block must then be free."""
    model.new_core(SchedulerLimits())
    assert model.pool.free_blocks == model.pool.blocks


def talk(
    model: api.Model, template: ChatTemplate | None = None, context_shift: bool = False, **options: object
) -> Conversation:
    notes: list[str] = []
    template, answer = template or template_of(model)[0], AnswerOptions.of(options)
    made = Conversation(model, template, GREEDY, notes.append, answer, context_shift=context_shift)
    made.notes = notes  # type: ignore[attr-defined]
    return made


def scripted(conversation: Conversation, *answers: Sequence[int]) -> None:
    conversation._sampler = Script(*answers)  # type: ignore[assignment]


def finish(reply: Reply) -> tuple[str, Usage]:
    return "".join(piece.text for piece in reply), reply.usage


def by_bytes(model: api.Model, text: str) -> list[int]:
    """Return the text as one token per byte, which no tokenizer produces, followed by the end-of-turn token."""
    tokenizer = model.tokenizer
    assert tokenizer is not None
    single = {
        tokenizer.piece(token): token for token in range(tokenizer.vocab_size) if len(tokenizer.piece(token)) == 1
    }
    end = tokenizer.id("<|im_end|>")
    assert end is not None
    return [single[bytes([byte])] for byte in text.encode()] + [end]


# -- what a turn evaluates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", ["Hello there, how are you?", " It began with a space", "and ended with lines\n\n", "é€"]
)
def test_an_answer_stays_in_the_cache_in_the_tokens_it_was_written_in(demo: api.Model, said: str) -> None:
    template, _ = template_of(demo)
    plain = ChatTemplate(template.source.replace(" | trim", ""), template.bos, template.eos)
    assert plain.source != template.source
    conversation = talk(demo, plain)
    first, second = by_bytes(demo, said), by_bytes(demo, "Good.")
    scripted(conversation, first, second)
    text, one = finish(conversation.say("Hi"))
    assert text == said
    held = conversation.tokens
    _, two = finish(conversation.say("And?"))
    assert held[-len(first) + 1 :] == first[:-1]
    assert conversation.tokens[: len(held)] == held
    assert two.reused_tokens == len(held) == one.prompt_tokens + len(first) - 1


def test_an_answer_that_the_template_shortens_is_evaluated_again_and_nothing_before_it(demo: api.Model) -> None:
    """Some chat templates remove reasoning or white space from earlier answers, so those tokens differ from
    the cached ones.
    """
    template, _ = template_of(demo)
    trimming = ChatTemplate(
        template.source.replace("message['content']", "message['content'].split('|')[-1]"),
        template.bos,
        template.eos,
    )
    conversation = talk(demo, trimming)
    assert trimming.source != template.source
    scripted(conversation, by_bytes(demo, "thoughts| Hello"), by_bytes(demo, "x"))
    _, one = finish(conversation.say("Hi"))
    _, two = finish(conversation.say("And?"))
    assert two.reused_tokens == one.prompt_tokens
    assert demo.detokenize(conversation.tokens).count("thoughts") == 0


def test_another_answer_evaluates_one_token_again(tiny: api.Model) -> None:
    conversation = talk(tiny, max_tokens=5)
    first, one = finish(conversation.say("one"))
    conversation._sampler = tiny.sampler(api.SamplingOptions(temperature=2.0, top_k=0, min_p=0.0, seed=3))
    other, two = finish(conversation.again())
    assert other != first
    assert (two.prompt_tokens, two.reused_tokens) == (one.prompt_tokens, one.prompt_tokens - 1)
    assert conversation.messages[-1]["content"] == other
    assert len(conversation.messages) == 2


@pytest.mark.parametrize("sampling", [{}, {"mirostat": 2}], ids=str)
@pytest.mark.parametrize("read", [0, 1, 4])
def test_an_answer_that_is_not_read_on_leaves_the_random_numbers_of_what_was_read(
    demo: api.Model, read: int, sampling: dict[str, Any]
) -> None:
    """The answer is generated ahead of its reader while another thread runs steps. The next turns must get the same
    random numbers as without these extra tokens.
    """
    found = []
    for ahead in (0, 3):
        conversation = demo.conversation(seed=3, temperature=1.0, max_tokens=20, ignore_eos=True, **sampling)
        with conversation.say("Tell me a story.") as reply:
            for _ in range(read):
                next(reply)
            for _ in range(ahead if read else 0):
                demo.stepper.step()
        found.append([conversation.say("And then?").tokens, conversation.say("Why?").tokens])
    assert found[0] == found[1]


def test_a_turn_that_is_taken_back_costs_nothing_of_those_before(tiny: api.Model) -> None:
    conversation = talk(tiny, max_tokens=5, system_prompt="Be brief.")
    finish(conversation.say("one"))
    after_one = list(conversation.messages)
    finish(conversation.say("two"))
    assert conversation.undo() == "two"
    assert conversation.messages == after_one
    held = len(conversation.tokens)
    _, again = finish(conversation.say("tww"))
    assert again.prompt_tokens - again.reused_tokens < 5 + len("w<|im_end|>\n<|im_start|>assistant\n") < held
    conversation.undo()
    assert conversation.undo() == "one"
    with pytest.raises(LocalLLMError, match="no turn to undo"):
        conversation.undo()
    with pytest.raises(LocalLLMError, match="nothing has been answered yet"):
        conversation.again()


# -- a full context --------------------------------------------------------------------------------------------------


def test_a_full_context_is_not_cut_in_silence(tiny: api.Model) -> None:
    conversation = talk(tiny, ignore_eos=True)
    assert conversation.say("one").end.reason == "context"
    before = list(conversation.messages)
    with pytest.raises(ContextFull, match="the context holds 128"):
        finish(conversation.say("two"))
    assert conversation.messages == before
    assert conversation.shift() == 0  # the only turn cannot be dropped


def test_the_oldest_turns_make_room_and_what_stays_is_as_if_nothing_had_been_before(tiny: api.Model) -> None:
    conversation = talk(tiny, max_tokens=20, system_prompt="Be brief.", context_shift=True)
    for turn in range(12):
        finish(conversation.say(f"turn {turn}"))
    notes = conversation.notes  # type: ignore[attr-defined]
    assert len(notes) >= 2
    assert all("tokens is full: the oldest" in note for note in notes)
    assert "tokens left are evaluated again" in notes[0]
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
    assert conversation.messages[1]["role"] == "user"
    assert conversation.messages[-2]["content"] == "turn 11"
    fresh = talk(tiny, max_tokens=20, system_prompt="Be brief.")
    fresh.messages = conversation.messages[:-2]
    empty(tiny)
    assert finish(fresh.say("turn 11"))[0] == conversation.messages[-1]["content"]


@pytest.mark.parametrize("turns", range(2, 9))
def test_a_shift_drops_as_few_turns_as_possible(tiny: api.Model, turns: int) -> None:
    """A context shift drops turns until the rest fits half of the context. The newest turn is never dropped."""
    conversation = talk(tiny)
    messages = [{"role": role, "content": str(n) * (3 + n)} for n in range(turns) for role in ("user", "assistant")]
    lengths = []
    for dropped in range(turns):
        conversation.resume(messages[2 * dropped :])
        lengths.append(len(conversation._prompt(conversation.messages)))
    expected = next((n for n in range(1, turns) if lengths[n] <= 64), turns - 1)
    conversation.resume(messages)
    assert conversation.shift() == expected
    assert conversation.messages == messages[2 * expected :]


def test_an_answer_goes_on_across_a_shift(tiny: api.Model) -> None:
    """A shift in the middle of an answer gives the same tokens as a fresh prompt with the remaining turns."""
    conversation = talk(tiny, ignore_eos=True, context_shift=True)
    scripted(conversation, [*range(300, 330), 4], [*range(300, 350)] + [310] * 200)
    conversation._ignore_eos = False
    finish(conversation.say("one"))
    conversation._ignore_eos = True
    reply = conversation.say("two")
    text, usage = finish(reply)
    assert [m["content"] for m in conversation.messages] == ["two", text]
    assert reply.end.reason == "context"  # no older turn can be dropped
    assert tiny.tokenize("x" + text, add_special=False)[-len(text) :] == conversation._answered
    assert usage.answer_tokens == len(conversation._answered)
    assert len(conversation.tokens) == 128


class Euros:
    """A sampler that repeats the three bytes of "€", depending on the tokens so far."""

    required_top_k, options = 0, GREEDY

    def __init__(self, count: int) -> None:
        self.history: list[int] = []
        self.count = count

    def sample(self, logits: np.ndarray) -> int:
        first, second, third = (5 + byte for byte in "€".encode())
        if self.history.count(third) == self.count:
            return 4
        return {first: second, second: third}.get(self.history[-1], first)

    finished = False

    def constrain(self, constraint: object, ends: Collection[int], ignore_eos: bool) -> None:
        self.ends = ends

    def is_end(self, token: int) -> bool:
        return token in self.ends

    def accept(self, token: int) -> None:
        self.history.append(token)

    write = accept

    def begin(self) -> None:
        self.history.clear()


@pytest.mark.parametrize("more", range(3))
def test_half_a_character_is_not_lost_in_a_shift(tiny: api.Model, more: int) -> None:
    """The context ends between the bytes of a character. After the shift, these bytes are sampled again."""
    conversation = talk(tiny, context_shift=True)
    scripted(conversation, [*range(300, 330), 4])
    finish(conversation.say("one"))
    conversation._sampler = Euros(24)  # type: ignore[assignment]
    text, _ = finish(conversation.say("two" + "o" * more))
    assert text == "€" * 24
    assert [m["content"] for m in conversation.messages] == ["two" + "o" * more, text]
    assert len(conversation.notes) == 1  # type: ignore[attr-defined]


def test_a_shift_by_hand_lets_the_answer_go_on(tiny: api.Model) -> None:
    conversation = talk(tiny, max_tokens=20)
    finish(conversation.say("one"))
    conversation._max_tokens = None
    conversation._ignore_eos = True
    reply = conversation.say("two")
    start, _ = finish(reply)
    assert reply.end.reason == "context"
    assert conversation.shift() == 1
    rest, _ = finish(conversation.go_on())
    assert rest
    assert conversation.messages == [{"role": "user", "content": "two"}, {"role": "assistant", "content": start + rest}]


def test_variables_reach_the_template(tiny: api.Model) -> None:
    template = ChatTemplate("{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}", "", "")
    conversation = talk(tiny, template, max_tokens=1, chat_template_kwargs={"mood": "glad "})
    finish(conversation.say("one"))
    assert tiny.detokenize(conversation.tokens).strip().startswith("glad one")


def test_a_summary_takes_the_place_of_the_turns(tiny: api.Model) -> None:
    conversation = talk(tiny, max_tokens=3, system_prompt="Be brief.")
    finish(conversation.say("one"))
    conversation.clear("Summary of the conversation so far: one")
    assert conversation.messages == [
        {"role": "system", "content": "Be brief.\n\nSummary of the conversation so far: one"}
    ]
    finish(conversation.say("two"))
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_first_messages_begin_every_conversation_and_are_no_turns(opened_demo: api.Model) -> None:
    first = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A plumber."}]
    template, _ = template_of(opened_demo)
    options = AnswerOptions.of({"system_prompt": "You are Mario.", "max_tokens": 4})
    conversation = Conversation(opened_demo, template, GREEDY, pytest.fail, options, first_messages=first)
    opening = [{"role": "system", "content": "You are Mario."}, *first]
    assert (conversation.messages, conversation.begun) == (opening, False)
    with pytest.raises(LocalLLMError, match="nothing has been answered yet"):
        conversation.undo()
    list(conversation.say("Hi"))
    assert (conversation.messages[:4], conversation.begun) == ([*opening, {"role": "user", "content": "Hi"}], True)
    list(conversation.say("And then?"))
    assert conversation.shift() == 1
    assert conversation.messages[:4] == [*opening, {"role": "user", "content": "And then?"}]
    conversation.clear()
    assert conversation.messages == opening
