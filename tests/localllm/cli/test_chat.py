"""`localllm chat` through a pipe, and the Conversation class."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import localllm as api
from localllm.chat import Conversation, is_plain, template_of
from localllm.cli.options import DisplayOptions
from localllm.cli.terminal import answer
from localllm.cli.terminal.answer import write
from localllm.engine import ContextFull
from localllm.generation.interfaces import SchedulerLimits
from localllm.generation.request import Finished
from localllm.generation.statistics import Usage
from localllm.options import AnswerOptions
from localllm.reply import Reply
from localllm.template import ChatTemplate
from tests.localllm.support import localllm, write_model

GREEDY = api.SamplingOptions(
    temperature=0.0, frequency_penalty=0.5, repeat_last_n=1000
)  # the answers differ if a token is penalized twice


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(tiny: Path) -> Iterator[api.Model]:
    with api.load(tiny) as opened:
        yield opened


def talk(model: api.Model, **options: object) -> Conversation:
    template, note = template_of(model)
    assert note is None
    return Conversation(model, template, GREEDY, pytest.fail, AnswerOptions.of(options))


# -- the Conversation class ----------------------------------------------------------------------------------------


def test_a_turn_is_the_continuation_of_all_turns_before(model: api.Model) -> None:
    conversation = talk(model, system_prompt="Be brief.", max_tokens=5)
    first = "".join(piece.text for piece in conversation.say("one"))
    reply = conversation.say("two").wait()
    written = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        f"<|im_start|>assistant\n{first}<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = model.tokenize(written, parse_special=True)
    model.new_core(SchedulerLimits())  # reset the KV cache
    assert reply.text == model.generate(ids, max_tokens=5, sampling=GREEDY).text
    assert reply.usage.prompt_tokens == len(ids)
    told = model.tokenize(written[: written.index(first)], parse_special=True)  # the first turn's prompt
    assert reply.usage.reused_tokens >= len(told)
    assert [m["role"] for m in conversation.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_a_cancelled_answer_counts_as_far_as_it_came(model: api.Model) -> None:
    conversation, cancel = talk(model), threading.Event()
    answer, reply = "", conversation.say("one", cancel)
    for piece in reply:
        answer += piece.text
        if len(answer) > 4:
            cancel.set()
    assert reply.end.reason == reply.finish_reason == "cancelled"
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.strip()}
    assert conversation.say("two", cancel).text == ""  # cancelled before its first token
    assert len(conversation.messages) == 2  # the turn was removed
    conversation.clear()
    assert conversation.messages == []


def test_a_turn_that_does_not_fit_is_refused_and_forgotten(tiny: Path) -> None:
    with api.load(tiny, ctx_size=64) as small:
        conversation = talk(small, max_tokens=3)
        with pytest.raises(ContextFull, match="the context holds 64"):
            list(conversation.say("x" * 100))
        assert conversation.messages == []
        assert conversation.say("x").usage.answer_tokens == 3


def test_a_conversation_holds_no_blocks(model: api.Model) -> None:
    """A conversation holds no KV blocks between turns.

    The evaluated tokens stay in the model's prefix cache, and may be evicted.
    """
    model.new_core(SchedulerLimits())
    assert model.pool.free_blocks == model.pool.blocks
    conversation = talk(model, max_tokens=3)
    conversation.say("one").wait()
    assert model.pool.free_blocks < model.pool.blocks
    model.new_core(SchedulerLimits())
    assert model.pool.free_blocks == model.pool.blocks
    again = conversation.say("two").wait()  # the cached tokens were evicted
    assert again.usage.reused_tokens == 0
    assert conversation.messages[-1] == {"role": "assistant", "content": again.text}


def test_a_file_without_template_gets_its_family_and_a_note(tmp_path: Path) -> None:
    with api.load(write_model(tmp_path / "bare.gguf", template=None)) as bare:
        template, note = template_of(bare)
    assert not is_plain(template)  # the vocabulary has <|im_start|>
    assert note is not None
    assert "chatml" in note


def test_an_answer_ends_at_the_template_s_stops(model: api.Model) -> None:
    whole = talk(model, max_tokens=8)
    answer = "".join(piece.text for piece in whole.say("one"))
    template, _ = template_of(model)
    stopping = ChatTemplate(template.source, template.bos, template.eos, stops=(answer[3:5],))
    reply = Conversation(model, stopping, GREEDY, pytest.fail).say("one")
    assert reply.text == answer[: answer.index(answer[3:5])]
    assert reply.end.reason == "stop"
    assert reply.end.stop == answer[3:5]


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    end, text = Finished("end", "", Usage()), "a\x1b[2Jb\n\tc\x9b"
    pieces = [api.Piece(text, 1, raw=text), api.Piece("", finished=end)]
    for stream, expected in ((Screen(), "a\\x1b[2Jb\n\tc\\x9b\n"), (io.StringIO(), "a\x1b[2Jb\n\tc\x9b\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        assert write(Reply(iter(pieces)), DisplayOptions(plain=True)) is end
        assert stream.getvalue() == expected


# -- through a pipe ------------------------------------------------------------------------------------------------


def test_from_a_pipe_every_line_is_a_turn(tiny: Path) -> None:
    done = localllm("chat", tiny, "-n", 6, "--temp", 0, stdin="one\n\n  \ntwo\n/clear\none\n/bye\nnever\n")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert len(lines) == 3
    assert lines[0] == lines[2] != lines[1]
    assert ">>>" not in done.stdout
    assert done.stderr.count("tokens/s, ") == 3
    assert re.search(r"^first token \d\.\d\d s, [\d.]+ tokens/s, \d+ of 512 tokens$", done.stderr, re.MULTILINE)


def test_all_statistics_are_shown_when_asked_for(tiny: Path) -> None:
    done = localllm("chat", tiny, "-n", 6, "-v", stdin="one\ntwo\n/stats on\nthree\n")
    assert done.stderr.count("| answer 6, ") == 2
    assert done.stderr.count(" reused), ") == 1
    assert done.stderr.count(" GB/s") >= 2
    assert done.stderr.count("tokens/s, ") == 1  # the third turn's short statistics
    wrong = localllm("chat", tiny, "-v", "--no-stats", stdin="one\n")
    assert (wrong.returncode, wrong.stderr) == (1, "error: -v/--stats and --no-stats exclude each other; give one\n")


@pytest.mark.parametrize(
    ("reads", "share"),
    [
        ([1e9] * 9, 0.5),
        ([1e9, 0.9e9, 0.9e9], 0.5),  # the measurements agree, so the fastest counts
        ([1e9, 0.2e9, 0.2e9], 0.0),  # other programs disturbed the measurement
        ([0.4e9] * 9, 0.0),  # the answer was faster than the measured bandwidth, so the measurement is wrong
        ([0.0] * 9, 0.0),  # weights too small for a measurement
    ],
)
def test_the_share_of_the_roof_is_known_where_its_measurement_holds(
    reads: list[float], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "_reads", lambda model, seconds: reads)
    assert answer.MeasuredRoof(None).share(0.5e9) == ((share, 1e9) if share else (0.0, 0.0))  # type: ignore[arg-type]


def test_statistics_can_be_left_out(tiny: Path) -> None:
    quiet = localllm("chat", tiny, "-n", 4, "--no-stats", stdin="one\n")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    toggled = localllm("chat", tiny, "-n", 4, stdin="/stats\none\n/stats\ntwo\n")
    assert toggled.stderr.count("first token") == 1


def test_a_full_context_is_said_with_what_to_do(tiny: Path) -> None:
    done = localllm("chat", tiny, "-c", 64, "--ignore-eos", stdin="one\n" + "two " * 100 + "\n")
    assert done.returncode == 0
    assert "the context of 64 tokens is full and the answer ends here" in done.stderr
    assert "-c N raises it, up to the trained length of 512" in done.stderr
    assert re.search("the context holds 64; shorten it, or -c N raises it", done.stderr)
    assert done.stderr.count("/shift drops the oldest turns") == 2
    assert "/clear starts over" in done.stderr


@pytest.mark.parametrize(("context", "told"), [(512, "no more"), (600, "512")])
def test_a_larger_context_is_not_advised_beyond_the_trained_length(tiny: Path, context: int, told: str) -> None:
    done = localllm("chat", tiny, "-c", context, "--ignore-eos", stdin="one\n" + "two " * 800 + "\n")
    full = f"the context of {context} tokens is full and the answer ends here; the model was trained on {told}\n"
    assert full in done.stderr
    assert re.search(rf"error: the prompt has \d+ tokens, but the context holds {context}; shorten it\n", done.stderr)
    assert "-c N" not in done.stderr


def test_a_missing_template_is_said(tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare.gguf", template=None)
    done = localllm("chat", bare, "-n", 2, stdin="one\n")
    assert "note: the file has no chat template; using the 'chatml' format" in done.stderr
