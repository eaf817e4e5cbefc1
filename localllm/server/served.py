"""One loaded model as the server uses it: prompts, the scheduler, and answers as turn events.

Rendering and tokenizing block, so they run in a worker thread, one at a time: templates of strangers may be slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from localllm.answer.parts import CallStart, Content, Part
from localllm.answer.reader import AnswerReader
from localllm.answer.structure import Asked
from localllm.cache.slot_files import SlotFiles
from localllm.closing import Closing
from localllm.embedding import normalized, pair
from localllm.held import held, held_text
from localllm.model import Model
from localllm.notice import Notice, Setting
from localllm.scheduler.draft_model import DraftModel
from localllm.scheduler.drafts import Drafts
from localllm.scheduler.interfaces import Observer, SchedulerLimits, Store
from localllm.scheduler.request import Event, Finished, Prompted, Request, Started, Written
from localllm.scheduler.scheduler import Scheduler
from localllm.server.bridge import events
from localllm.server.errors import BadRequest, NotSupported, PromptTooLong
from localllm.server.prompts import Prompt, Prompts
from localllm.server.turn import (  # fmt: skip
    Begun,
    Completion,
    Done,
    EmbedResult,
    Evaluated,
    Generation,
    More,
    SlotAction,
    StopReason,
    Turn,
    TurnEvent,
)

T = TypeVar("T")
_REASONS: dict[str, StopReason] = {
    "end": "end", "stop": "stop", "length": "length", "context": "length", "cancelled": "cancelled",
}  # fmt: skip


class Served(Closing):
    """A model that answers. `close` ends its scheduler and frees it."""

    def __init__(
        self,
        model: Model,
        limits: SchedulerLimits,
        observer: Observer | None = None,
        sampling: Mapping[str, Any] | None = None,
        store: Store | None = None,
        slots: SlotFiles | None = None,
    ) -> None:
        """`sampling`: options for requests that do not give them. `store`: prefixes on disk. `slots`: saved slots."""
        self.model, self.sampling = model, sampling or {}
        self.embeds, self._slots = model.embeds, slots
        self.prompts = Prompts(model)
        self._worker = ThreadPoolExecutor(1, "prompts")
        self._scheduler: Scheduler | None = None
        if not self.embeds:
            self._scheduler = Scheduler(
                model.engine, model.tokenizer, model.sampler, limits, drafts_of(model), observer, store
            )

    @property
    def scheduler(self) -> Scheduler:
        if self._scheduler is None:
            raise NotSupported("this model gives embeddings, not text; ask another model")
        return self._scheduler

    @property
    def bytes(self) -> int:
        """The memory of weights, cache and scratch, of a draft model too."""
        models = [self.model] if self.model.draft is None else [self.model, self.model.draft]
        memories = [model.executable.memory for model in models]
        return sum(memory.weights + memory.cache + memory.scratch for memory in memories)

    async def work(self, job: Callable[[], T]) -> T:
        """Run what blocks in the model's worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, job)

    # -- answers ---------------------------------------------------------------------------------------------------

    async def answer(self, turn: Turn) -> AsyncGenerator[TurnEvent, None]:
        """Stream the answer to a conversation."""
        scheduler = self.scheduler
        request, readers = await self.work(lambda: self._asked(turn))
        async with aclosing(self._stream(scheduler, request, turn.generation, readers)) as stream:
            async for event in stream:
                yield event

    async def complete(self, completion: Completion) -> AsyncGenerator[TurnEvent, None]:
        """Stream the continuation of a text."""
        scheduler = self.scheduler

        def asked() -> Request:
            prompt = self.prompts.of_text(completion)
            constraint = held_text(self.model, completion.generation.structure)
            request = self._request(prompt, completion.generation)
            return replace(request, prompt_logprobs=completion.echo_logprobs, constraint=constraint)

        request = await self.work(asked)
        async with aclosing(self._stream(scheduler, request, completion.generation, None)) as stream:
            async for event in stream:
                yield event

    async def prompt(self, turn: Turn) -> Prompt:
        """Return the prompt of a turn."""
        return await self.work(lambda: self.prompts.of_turn(turn, tools_of(turn)))

    async def _stream(
        self,
        scheduler: Scheduler,
        request: Request,
        generation: Generation,
        readers: Callable[[], AnswerReader] | None,
    ) -> AsyncGenerator[TurnEvent, None]:
        """Submit a request, `generation.n` times with different seeds, and yield its events with parsed text."""
        requests = _several(request, generation.n)
        texts = [_Text(readers() if readers is not None else None) for _ in requests]
        async with aclosing(events(scheduler.submit, requests)) as source:
            async for number, event in source:
                for told in texts[number].told(event, number):
                    yield told

    def _asked(self, turn: Turn) -> tuple[Request, Callable[[], AnswerReader]]:
        """Return the request for a turn, and what makes a reader of its answer."""
        tools = tools_of(turn)
        prompt = self.prompts.of_turn(turn, tools)
        format_, tail = self.prompts.format, prompt.tail
        forced = turn.tool_choice == "required" or bool(turn.forced_tool)
        structure, budget = turn.generation.structure, turn.thinking.budget
        asked = Asked(structure, tools, turn.parallel_calls, budget, forced)
        constraint = held(self.model, asked, self.prompts.template, tail)
        visible = format_.visible(self.model.words.special)
        request = self._request(prompt, turn.generation)
        request = replace(request, visible=visible, constraint=constraint, resumed=True)  # content is its tokens' text
        return request, lambda: AnswerReader(
            format_,
            tools,
            tail,
            inline=bool(turn.thinking.inline),
            read_calls=not turn.calls_inline,
            resumed=prompt.resumed,
        )

    def _request(self, prompt: Prompt, generation: Generation) -> Request:
        context = self.model.context
        if len(prompt.ids) > context:
            count = len(prompt.ids)
            size = f"the available context size of {context} tokens"  # llama.cpp's words, which clients look for
            message = f"the prompt has {count} tokens and exceeds {size}; shorten it"
            raise PromptTooLong(message, count, context)
        return Request(
            prompt=prompt.ids,
            sampling=self.model.sampling_defaults.options({**self.sampling, **generation.sampling}),
            max_tokens=generation.max_tokens,
            stops=(*generation.stops, *prompt.stops),
            ignore_eos=generation.ignore_eos,
            logprobs=generation.logprobs,
            sampled=generation.sampled,
            resumed=prompt.resumed,
            reuse=generation.reuse,
            place=generation.slot,
            priority=generation.priority,
            client=generation.client,
        )

    async def slot(self, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        """Save, restore or erase what a slot evaluated last; return its tokens, and the bytes of its file."""
        files, between = self._slots, self.scheduler.between
        assert files is not None, "the settings say so"
        if action == "save":
            return await asyncio.wrap_future(between(lambda at: at.save(number, lambda one: files.save(name, one))))
        if action == "restore":
            return await asyncio.wrap_future(between(lambda at: at.load(number, lambda: files.load(name))))
        return await asyncio.wrap_future(between(lambda at: at.erase(number))), 0

    # -- vectors ---------------------------------------------------------------------------------------------------

    async def embed(self, texts: Sequence[str | Sequence[int]], pooling: str, normalize: bool = True) -> EmbedResult:
        """Return the vectors of texts; with pooling "none" those of their tokens."""

        def run() -> EmbedResult:
            model = self._embedding()
            ids = [model.prompt_ids(text) if isinstance(text, str) else list(text) for text in texts]
            way = model.embedder.pooling(pooling)
            vectors = list(model.embedder.vectors(ids, way))
            tokens = sum(map(len, ids))
            if way == "none":
                return EmbedResult([], tokens, [rows.tolist() for rows in vectors])
            found = list(normalized(vectors)) if normalize and way != "rank" else vectors
            return EmbedResult([one.tolist() for one in found], tokens)

        return await self.work(run)

    async def rank(self, query: str, documents: Sequence[str]) -> EmbedResult:
        """Return one score for each document."""

        def run() -> EmbedResult:
            model = self._embedding()
            scores = model.rank(query, documents)
            words, data = model.words, model.file.metadata
            tokens = sum(len(pair(words, data, query, document)) for document in documents)  # the query with each
            return EmbedResult([[float(score)] for score in scores], tokens)

        return await self.work(run)

    def _embedding(self) -> Model:
        if not self.embeds:
            raise NotSupported(
                Notice("this model was started to write text; for vectors, start with ", Setting("embeddings"))
            )
        return self.model

    def close(self) -> None:
        """End the scheduler, and free the model."""
        if self._scheduler is not None:
            self._scheduler.close()
        self._worker.shutdown(cancel_futures=True)
        self.model.close()


def tools_of(turn: Turn) -> list[Mapping[str, Any]]:
    """Return the tools that the model is told of."""
    tools = [] if turn.tool_choice == "none" else list(turn.tools)
    if turn.forced_tool:
        tools = [tool for tool in tools if tool["function"]["name"] == turn.forced_tool]
        if not tools:
            raise BadRequest(f"tool_choice names {turn.forced_tool!r}, which is not among the tools", "tool_choice")
    return tools


def drafts_of(model: Model) -> Drafts | None:
    """Return what drafts for a batch, if the options ask for it: repetitions, the draft model or both."""
    speculation = model.speculation
    if speculation is None:
        return None
    costs, longest = speculation.costs, min(speculation.options.draft_max, speculation.costs.most - 1)
    drafter = DraftModel(*speculation.drafting, costs, longest) if speculation.drafting is not None else None
    return Drafts(costs, longest, drafter, repeats=speculation.options.kind != "draft")


class _Text:
    """One answer on its way: its reader, and whether it called a tool."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader, self._called = reader, False

    def told(self, event: Event, number: int) -> tuple[TurnEvent, ...]:
        """Return what the protocols are told of an event."""
        match event:
            case Started():
                return (Begun(event.prompt_tokens, event.reused, number),)
            case Prompted():
                return (Evaluated(event.evaluated, number, event.logprobs),)
            case Written():
                return (More(self._parts(event.text), event.token, event.logprob, number),)
            case Finished():
                reason = _REASONS[event.reason]
                parts = self._parts(event.text, last=True, cut=reason in ("length", "cancelled"))
                if self._called and reason in ("end", "stop"):
                    reason = "tool_calls"
                done = Done(reason, event.usage, event.stop, number)
                return (More(parts, answer=number), done) if parts else (done,)
            case _:
                raise AssertionError(event)

    def _parts(self, text: str, last: bool = False, cut: bool = False) -> tuple[Part, ...]:
        if self._reader is None:
            return (Content(text),) if text else ()
        parts = self._reader.push(text) if text else ()
        if last:
            parts = (*parts, *self._reader.finish(cut))
        self._called = self._called or any(isinstance(part, CallStart) for part in parts)
        return parts


def _several(request: Request, count: int) -> list[Request]:
    """Return `count` requests for the same prompt, with following seeds."""
    if count == 1:
        return [request]
    seed = request.sampling.seed
    seeds = [seed + number if seed >= 0 else -1 for number in range(count)]
    return [
        replace(request, sampling=replace(request.sampling, seed=one % 2**64 if one >= 0 else one)) for one in seeds
    ]
