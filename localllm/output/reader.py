"""`AnswerReader`: splits the streamed text of an answer into reasoning, content and tool calls.

    reader = AnswerReader(find_format(template.source), tools, prompt_tail=prompt[-200:])
    for text in answer:
        parts = reader.push(text)
    parts = reader.finish()

The text must contain the control tokens in `AnswerFormat.visible`, and no other control tokens. The joined parts do not
depend on how the text is split into chunks. A malformed call raises no error, but becomes content exactly as written.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.generation.parts import Content, Part, Reasoning
from localllm.generation.request import Event, Finished, Token
from localllm.output.calls import CallContext, call_list, read_calls
from localllm.output.channels import HEADER_STARTS, ChannelHeader, open_header
from localllm.output.incoming import MOST_HEADER, Incoming, Markers, Wait
from localllm.output.literal import literal
from localllm.output.parts_writer import PartsWriter, whole_calls
from localllm.output.values import Schemas
from localllm.template.format import SPACES, AnswerFormat, Channels, ReasoningMarkers
from localllm.template.reasoning import reasoning_state

_LETTERS = string.ascii_letters + string.digits


def make_id() -> str:
    """Return an id for a call: nine letters and digits, as Mistral's templates require."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class AnswerReader:
    """Parses one answer.

    `tools` are the tools that may be called, in OpenAI's format. `prompt_tail` is the end of the prompt, which shows
    whether reasoning has begun. With `inline`, reasoning stays in the content, in the model's format. Without
    `read_calls`, tool calls stay in the content too. With `resumed`, the reasoning or the content began in the prompt,
    so its start marker is not shown inline.
    """

    def __init__(
        self,
        format_: AnswerFormat,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt_tail: str = "",
        make_id: Callable[[], str] = make_id,
        *,
        inline: bool = False,
        read_calls: bool = True,
        resumed: bool = False,
    ) -> None:
        self._format, self._inline, self._read_calls = format_, inline, read_calls
        self._text = Incoming()
        self._out = PartsWriter(make_id)
        self._context = CallContext(self._text, self._out, Schemas(tools if read_calls else ()))
        channels, calls = format_.channels, format_.calls
        markers = format_.thinking if channels is None else ReasoningMarkers("", "")  # headers mark reasoning
        self._ends = () if channels is None else (*channels.ends, channels.start)
        self._end_markers = Markers(self._ends)
        self._headed = channels is not None and channels.heads_calls
        opens = calls.opens if self._context.tools and not self._headed else ()
        closes = calls.section[1] if opens else ""
        plain = (markers.start, markers.end, *format_.dropped, *self._ends)
        self._content_markers, self._plain_markers = Markers((*plain, *opens, closes)), Markers(plain)
        called = opens if format_.calls_in_reasoning else ()
        self._reasoning_markers = Markers((markers.end, *markers.ended_by, *called))
        self._run = (self._headless if channels is None else self._channels)(prompt_tail, resumed)
        self._finished = self._cut = False
        self._markers: Markers | None = None  # the markers to find in content or reasoning
        self._plain: tuple[re.Pattern[str], type[Content | Reasoning]] | None = None
        next(self._run, None)

    def push(self, text: str) -> tuple[Part, ...]:
        """Return the parts that this text completes."""
        assert not self._finished, "the answer has ended"
        if self._plain is not None and text and text[-1] not in SPACES:  # fast path, for most tokens
            starts, kind = self._plain
            if not starts.search(text):
                return (kind(text),)
        self._text.push(text)
        next(self._run, None)
        through = self._markers is not None and self._text.empty and self._out.within_text
        self._plain = (self._markers.starts, self._out.kind) if through and self._markers is not None else None
        return self._out.drain()

    def finish(self, cut: bool = False) -> tuple[Part, ...]:
        """End the answer, and return the parts of text that was held back. `cut` is true if the answer was
        truncated."""
        self._finished, self._cut = True, cut
        self._text.close()
        next(self._run, None)
        self._out.finish()
        return self._out.drain()

    @property
    def called(self) -> bool:
        """Whether the answer has called a tool so far."""
        return self._out.count > 0

    # -- text with markers -----------------------------------------------------------------------------------------

    def _until(self, markers: Markers) -> Wait[str]:
        """Show text up to a marker and return the marker, or "" at the end.

        Meanwhile `push` skips the parser for text that cannot start a marker. For this, `_plain` has a pattern of the
        first characters of markers, and the kind of the text.
        """
        self._markers = markers
        marker = yield from self._text.until(markers, self._out.text)
        self._markers = None
        return marker

    def _headless(self, prompt_tail: str, resumed: bool) -> Wait[None]:
        if reasoning_state(self._format, prompt_tail) == "open":
            start = self._format.thinking.start.rstrip()
            yield from self._reasoning("" if resumed else prompt_tail[prompt_tail.rindex(start) :], resumed)
        yield from self._content()

    def _content(self, calls: bool = True) -> Wait[str]:
        """Read content, and the reasoning and `calls` in it. Return the marker that ends it, or ""."""
        markers = self._content_markers if calls else self._plain_markers
        while True:
            if calls:
                yield from self._bare_call()
            marker = yield from self._until(markers)
            if not marker or marker in self._ends:
                return marker
            yield from self._marker(marker)

    def _marker(self, marker: str) -> Wait[None]:
        """Handle a marker that was found in content."""
        out, thinking, calls = self._out, self._format.thinking, self._format.calls
        if marker == thinking.start and (out.blank or thinking.anywhere):
            yield from self._reasoning(marker)
        elif marker == thinking.end and (out.blank or thinking.anywhere) and not self._inline:
            out.skip()  # the reasoning ended in the prompt, or is missing
        elif marker in self._format.dropped or (marker == calls.section[1] and out.called):
            out.skip()
        elif marker in calls.opens:
            yield from self._call(marker)
        else:
            out.text(marker)

    def _reasoning(self, start: str, resumed: bool = False) -> Wait[None]:
        """Read reasoning that began with `start`. Calls in it are reasoning text, unless the format allows calls
        there."""
        thinking = self._format.thinking
        if self._inline and thinking.ended_by and (yield from self._text.follows(thinking.ended_by)):
            start = ""  # the reasoning is empty
        self._enter_reasoning(start, resumed)
        while True:
            marker = yield from self._until(self._reasoning_markers)
            if not marker:
                return
            if marker == thinking.end or marker in thinking.ended_by:
                self._leave_reasoning(marker if marker == thinking.end else "")
                if marker != thinking.end:
                    yield from self._marker(marker)
                return
            if (yield from (self._call(marker, strict=True) if self._out.blank else self._last_calls(marker))):
                return

    def _enter_reasoning(self, start: str, resumed: bool) -> None:
        if self._inline:
            self._out.text(start)
        else:
            self._out.enter("reasoning", resumed)

    def _leave_reasoning(self, end: str) -> None:
        if self._inline:
            self._out.text(end)
        else:
            self._out.enter("content")

    # -- calls -----------------------------------------------------------------------------------------------------

    def _call(self, marker: str, strict: bool = False) -> Wait[bool]:
        """Read the calls after a marker. Without valid calls, show the text. If `strict`, only calls of known tools are
        valid."""
        self._text.record()
        called = yield from read_calls(replace(self._context, strict=strict), self._format.calls, marker)
        if not called:
            self._out.text(marker)
            self._out.text(self._text.back())
        return called

    def _last_calls(self, marker: str) -> Wait[bool]:
        """Read the calls after a marker in reasoning. The calls count if they are complete and at the end of the
        answer.

        Otherwise the model only mentions the calls, and they are part of the reasoning.
        """
        text, trial = self._text, self._out.trial()
        context = replace(self._context, out=trial, strict=True)
        form = self._format.calls
        text.record()
        following = marker
        while following:
            text.record()
            if not (yield from read_calls(context, form, following)):
                text.back()
                break
            yield from text.spaces()
            if (yield from text.accept(form.section[1])):
                yield from text.spaces()
            following = yield from text.accept_one(form.opens)
        calls = trial.drain()
        if (yield from text.peek()) or self._cut or not whole_calls(calls):
            self._out.text(marker)
            self._out.text(text.back())
            return False
        text.forget()
        self._out.calls(calls)
        return True

    def _bare_call(self) -> Wait[None]:
        """Read a call without markers, if the format allows it and only white space came before."""
        form = self._format.calls
        if not (form.bare and self._context.tools and self._out.blank):
            return
        gap = yield from self._text.spaces()
        if (yield from self._text.peek()) != "{":
            self._out.text(gap)
            return
        self._text.record()
        if not (yield from call_list(self._context, form)):
            self._out.text(gap + (self._text.back() or self._text.take(1)))

    # -- messages with headers -------------------------------------------------------------------------------------

    def _channels(self, prompt_tail: str, resumed: bool) -> Wait[None]:
        channels = self._format.channels
        assert channels is not None
        header, marker = open_header(channels, prompt_tail), ""
        begun = header is not None and resumed
        while True:
            if header is None:
                header = yield from self._header(channels, marker)
            marker = yield from self._message(header, begun)
            if not marker:
                return
            header, begun = None, False

    def _header(self, channels: Channels, before: str) -> Wait[ChannelHeader]:
        """Read the header of a message, after the marker `before`. Text that is not a header is content.

        A header of "arrows" after another message must name a known tool.
        """
        arrows = channels.kind == "arrows"
        if not before and not arrows and not (yield from self._text.follows(HEADER_STARTS)):
            return ChannelHeader("content")
        parts: list[str] = []
        found = yield from self._text.until(Markers((channels.header_end,)), parts.append, MOST_HEADER)
        text = "".join(parts)
        header = ChannelHeader.read(channels, text)
        named = arrows and before != ""
        if found and not (named and header.kind == "call" and header.name not in self._context.tools):
            return header
        if named:
            self._out.text(before + text + found)
        elif not text.lstrip().startswith(HEADER_STARTS):  # otherwise the header is truncated
            self._out.text(text)
        return ChannelHeader("goes on")

    def _message(self, header: ChannelHeader, begun: bool) -> Wait[str]:
        """Read a message; return the marker that ends it, or "". If `begun`, the message began in the prompt."""
        thinking = self._format.thinking
        if header.kind == "reasoning":
            self._enter_reasoning("" if begun else thinking.start, begun)
            marker = yield from self._until(self._end_markers)
            self._leave_reasoning(marker and thinking.end)
            return marker
        if header.kind != "goes on" and not self._inline:
            self._out.enter("content", begun)
        if header.kind == "call" and self._headed:
            if not self._reads(header.name):
                return (yield from self._text.until(self._end_markers, lambda text: None))
            yield from self._headed_call(header.name.removeprefix(self._format.calls.prefix))
        return (yield from self._content(calls=header.kind == "call"))

    def _reads(self, recipient: str) -> bool:
        """Return whether to parse a message to a tool. Messages to tools that were not offered are dropped."""
        calls, tools = self._format.calls, self._context.tools
        if not self._read_calls or not calls.prefix:
            return True
        return bool(tools) and (recipient.startswith(calls.prefix) or recipient in tools)

    def _headed_call(self, name: str) -> Wait[None]:
        """Read the arguments of a call to the tool that the header names."""
        if not self._context.tools:
            return
        gap = yield from self._text.spaces()
        if (yield from self._text.peek()) == "{":
            self._context.start(name)
            yield from literal(self._text, self._out.arguments)
        else:
            self._out.text(gap)


def with_parts(event: Event, reader: AnswerReader | None) -> Event:
    """Return an event with the parts that its text completes. Without a reader, all text is content.

    If an answer ended by itself and called tools, its finish reason is "tool_calls".
    """
    if isinstance(event, Token):
        if not event.text:
            return event
        event.parts = (Content(event.text),) if reader is None else reader.push(event.text)
        return event
    if not isinstance(event, Finished):
        return event
    if reader is None:
        return replace(event, parts=(Content(event.text),)) if event.text else event
    whole = event.reason in ("end", "stop")
    parts = (*(reader.push(event.text) if event.text else ()), *reader.finish(cut=not whole))
    return replace(event, parts=parts, reason="tool_calls" if whole and reader.called else event.reason)
