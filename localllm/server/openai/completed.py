"""Convert events to completions: the chunks of a stream, or the complete object.

Choice `prompt * n + i` is the i-th choice for prompt number `prompt`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localllm.generation.parts import Content
from localllm.generation.request import Event, Finished, Prefilled, Started, Token
from localllm.server.collected import Collected, timings
from localllm.server.openai.generation import GenerationBody
from localllm.server.openai.head import DONE, FINISHED, ReplyHead, usage_of
from localllm.server.openai.logprobs import Lists
from localllm.server.streams import Writer
from localllm.server.turn import Json

KIND = "text_completion"


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as part of the output. `first` is the text of its first token, which has no log probability."""

    text: str
    first: str | None = None  # None: the first token is an added BOS, which is not shown


class _Choice:
    """A choice, with the events received so far."""

    def __init__(self, echo: Echo | None) -> None:
        self.answer = Collected()
        self.lists = Lists()
        self.echo = echo
        self.echoed = echo is None


class CompletionWriter(Writer[tuple[int, Event]]):
    """Converts events to chunks or one object."""

    def __init__(self, head: ReplyHead, echoes: Sequence[Echo | None], n: int, asked: GenerationBody) -> None:
        self._head, self._n, self._asked = head, n, asked
        self._prompts = len(echoes)
        self._choices = [_Choice(echo) for echo in echoes for _ in range(n)]

    def add(self, numbered: tuple[int, Event]) -> None:
        """Add an event with the number of its prompt."""
        prompt, event = numbered
        choice = self._choices[prompt * self._n + event.choice]
        choice.answer.add(event)
        match event:
            case Started() if choice.echo is not None and choice.echo.first is not None:
                choice.lists.add_first(choice.echo.first)
            case Prefilled():
                for logprob in event.logprobs:
                    choice.lists.add(logprob)
            case Token() if event.logprob is not None:
                choice.lists.add(event.logprob)

    def events(self, numbered: tuple[int, Event]) -> Iterator[Json]:
        """Yield the chunks for an event with the number of its prompt."""
        prompt, event = numbered
        number = prompt * self._n + event.choice
        choice = self._choices[number]
        if isinstance(event, Token | Finished) and choice.echo is not None and not choice.echoed:
            choice.echoed = True
            yield self._chunk(number, choice.echo.text)
        self.add(numbered)
        match event:
            case Started() | Prefilled() if self._asked.return_progress:
                yield self._chunk(number, "", logprobs=False) | choice.answer.progress.prefill
            case Token():
                yield from self._text(number, event)
            case Finished():
                yield from self._text(number, event)
                chunk = self._chunk(number, "", FINISHED[event.reason])
                yield chunk | ({} if self._asked.shows_usage else {"timings": timings(event.usage)})

    def _text(self, number: int, event: Token | Finished) -> Iterator[Json]:
        text = "".join(part.text for part in event.parts if isinstance(part, Content))
        if text:
            timings = (
                {"timings": self._choices[number].answer.progress.timings} if self._asked.timings_per_token else {}
            )
            yield self._chunk(number, text) | timings

    def last(self) -> Iterator[bytes | Json]:
        """Yield the end of a stream, with the usage if requested."""
        if self._asked.shows_usage:
            yield self._whole(())
        yield DONE

    def whole(self) -> Json:
        """Return the object with all choices, once they are complete."""
        choices = []
        for number, choice in enumerate(self._choices):
            assert choice.answer.done is not None
            text = (choice.echo.text if choice.echo else "") + choice.answer.content
            choices.append(_choice_json(number, text, choice.lists.take(), FINISHED[choice.answer.done.reason]))
        return self._whole(choices)

    def _whole(self, choices: Sequence[Json]) -> Json:
        answers = [choice.answer for choice in self._choices]
        numbers = {"usage": usage_of(answers, self._prompts), "timings": timings(answers[0].usage)}
        return self._head.body(KIND, choices) | numbers

    def _chunk(self, number: int, text: str, finish: str | None = None, *, logprobs: bool = True) -> Json:
        lists = self._choices[number].lists.take() if logprobs else None
        body = self._head.body(KIND, (_choice_json(number, text, lists, finish),))
        return body | ({"usage": None} if self._asked.shows_usage else {})


def _choice_json(number: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}
