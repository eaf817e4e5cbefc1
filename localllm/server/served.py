"""One loaded model in the server: prompts, scheduler requests, tokens and vectors.

Blocking work runs in lanes (`lanes.py`). There is one lane each for short prompts, large prompts, pictures and sound,
compiling grammars, searching the vocabulary for sequence breakers, and vectors.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from localllm.base.closing import Closing
from localllm.base.notices import Notice, Setting
from localllm.constrained.constraint import GrammarVocabulary, NotCompiled
from localllm.constrained.request import Constrained, Recipe
from localllm.embedding import TextPooler, normalized, rank_pair
from localllm.generation.interfaces import Observer, PrefixStore, SchedulerLimits
from localllm.generation.request import Request
from localllm.generation.scheduler import RequestScheduler, Scheduler
from localllm.loading.media_parts import has_media
from localllm.model import Model
from localllm.models.config import Pooling
from localllm.options import SamplingOptions
from localllm.options.structure import ConstraintSpec
from localllm.output.reader import AnswerReader
from localllm.saved.slot_files import SlotFiles
from localllm.server.accounts import ACCOUNT
from localllm.server.bridge import Inbox
from localllm.server.errors import BadRequest, NotSupported, PromptTooLong
from localllm.server.lanes import Lane, is_large
from localllm.server.preparing import Preparing
from localllm.server.prompts import Prompt, Prompts
from localllm.server.turn import Completion, EmbedResult, Generation, SlotAction, Turn

if TYPE_CHECKING:
    from localllm.constrained.child import GrammarChild
    from localllm.template import ChatTemplate
    from localllm.tokenizer import Tokenizer

F32 = NDArray[np.float32]
P = TypeVar("P", str, "str | Sequence[int]")
R = TypeVar("R")
Pieces = list[bytes]  # of each token
PART = 1 << 13  # maximum characters and token ids per batch of texts to embed


class Served(Closing):
    """A loaded model. `close` ends its scheduler and frees the model."""

    def __init__(
        self,
        model: Model,
        limits: SchedulerLimits,
        observer: Observer | None = None,
        sampling: Mapping[str, Any] | None = None,
        store: PrefixStore | None = None,
        slots: SlotFiles | None = None,
        scheduler: RequestScheduler | None = None,
    ) -> None:
        """Start a model. `sampling` has the defaults for requests, `store` the prefixes on disk, and `slots` the saved
        slots. `scheduler` runs the requests of a model in other processes; it is closed with this model."""
        self.model, self.sampling = model, sampling or {}
        self.embeds, self._slots = model.embeds, slots
        self._short = Room(Prompts(model), Lane("prompts"))
        self._large = Room(Prompts(model, beside=True), Lane("large prompts", heavy=True))
        self._preparing = Preparing(model)
        self._media = Room(Prompts(model, beside=True), self._preparing.lane)
        self._grammars, self._vectors = Lane("grammars", heavy=True), Lane("vectors")
        self._breakers = Lane("sequence breakers")
        self._child: GrammarChild | None = None
        self._scheduler = scheduler
        if scheduler is None and not self.embeds:
            self._scheduler = Scheduler(model.new_core(limits, observer, store))

    @property
    def scheduler(self) -> RequestScheduler:
        if self._scheduler is None:
            raise NotSupported("this model returns embeddings, not text; use another model")
        return self._scheduler

    def room(self, *values: Any) -> Room:
        """Return the lane and prompt builder for these values. A large prompt waits only for other large prompts."""
        return self._large if is_large(*values) else self._short

    # -- answers ---------------------------------------------------------------------------------------------------

    async def of_turn(self, turn: Turn) -> Prepared:
        """Return the requests for the next message of a conversation."""
        room, turn = self._room_of(turn), await self._preparing.turn(turn)
        made = await room.lane.run(lambda: self._asked(room.prompts, turn))
        request = made.request
        if not made.asked.free:
            recipe = Recipe(made.asked, made.template.source, made.tail)
            request = replace(request, constraint=await self._constrained(room, recipe))
        return Prepared(_several(await self._with_breakers(request), turn.generation.n), made.readers)

    async def of_completion(self, completion: Completion) -> Prepared:
        """Return the requests for the continuation of a text."""
        biases = list(completion.generation.biases)
        room = self.room(completion.prompt, completion.suffix or "", completion.extra, biases)
        room = self._media if completion.media else room
        completion = await self._preparing.completion(completion)

        def asked() -> Request:
            request = self._request(room.prompts.of_text(completion), completion.generation)
            return replace(request, prompt_logprobs=completion.echo_logprobs)

        request = await room.lane.run(asked)
        structure = completion.generation.structure
        if structure is not None:
            recipe = Recipe(ConstraintSpec(structure))
            request = replace(request, constraint=await self._constrained(room, recipe))
        return Prepared(_several(await self._with_breakers(request), completion.generation.n), lambda: None)

    async def prompt(self, turn: Turn) -> Prompt:
        """Return the prompt of a turn."""
        room, turn = self._room_of(turn), await self._preparing.turn(turn)
        return await room.lane.run(lambda: room.prompts.of_turn(turn, tools_of(turn)))

    def _room_of(self, turn: Turn) -> Room:
        if has_media(turn.messages):
            return self._media
        return self.room(turn.messages, turn.tools, turn.template_variables, list(turn.generation.biases))

    async def _constrained(self, room: Room, recipe: Recipe) -> Constrained | None:
        """Return the constraint of the output. A separate lane compiles grammars until the request ends."""
        tokenizer, grammars = self.model.tokenizer, self.model.grammars
        with suppress(NotCompiled):
            return await room.lane.run(lambda: recipe.made(_Words(tokenizer, grammars.known())))
        stop = threading.Event()

        def compiled() -> Constrained | None:
            if self._child is None:
                self._child = grammars.new_child()
            return recipe.made(_Words(tokenizer, grammars.checked(self._child, stop)))

        return await self._grammars.run(compiled, stop.set)

    async def _with_breakers(self, request: Request) -> Request:
        """Add DRY's sequence breakers to a request that needs them. A separate lane searches for new sequence
        breakers."""
        strings, breakers = request.sampling.dry_sequence_breaker, self.model.dry_breakers
        if not request.sampling.dry_multiplier or breakers is None:
            return request
        found = breakers.known(strings)
        if found is None:
            found = await self._breakers.run(partial(breakers.find, strings))
        return replace(request, dry_breakers=found)

    def _asked(self, prompts: Prompts, turn: Turn) -> _Asked:
        """Return the request for a turn without its constraint, and a factory for readers of the output."""
        tools = tools_of(turn)
        prompt = prompts.of_turn(turn, tools)
        format_, tail = prompts.format, prompt.tail
        forced = turn.tool_choice == "required" or bool(turn.forced_tool)
        structure, budget = turn.generation.structure, turn.thinking.budget
        asked = ConstraintSpec(structure, tools, turn.parallel_calls, budget, forced)
        visible = format_.visible(self.model.tokenizer.special)
        # `resumed` keeps the leading space of the generated text.
        request = replace(self._request(prompt, turn.generation), visible=visible, resumed=True)
        readers = partial(
            AnswerReader,
            format_,
            tools,
            tail,
            inline=bool(turn.thinking.inline),
            read_calls=not turn.calls_inline,
            resumed=prompt.resumed,
        )
        return _Asked(request, readers, asked, prompts.template, tail)

    def _request(self, prompt: Prompt, generation: Generation) -> Request:
        context = self.model.context
        if prompt.count > context:
            raise PromptTooLong.of(prompt.count, context)
        return Request(
            prompt=prompt.ids,
            sampling=self.model.sampling_defaults.options({**self.sampling, **self._sampling(generation)}),
            max_tokens=generation.max_tokens,
            stops=(*generation.stops, *prompt.stops),
            ignore_eos=generation.ignore_eos,
            logprobs=generation.logprobs,
            sampled=generation.sampled,
            resumed=prompt.resumed,
            reuse=generation.reuse,
            slot=generation.slot,
            priority=generation.priority,
            client=generation.client,
        )

    def _sampling(self, generation: Generation) -> Mapping[str, Any]:
        """Return the sampling options with all biases by token id. Ids outside the vocabulary are dropped."""
        given = generation.sampling.get("logit_bias", {})
        if not given and not generation.biases:
            return generation.sampling
        self._short.prompts.check_length(*generation.biases)
        vocabulary = self.model.vocabulary
        biases = {token: bias for token, bias in given.items() if 0 <= token < vocabulary}
        for text, bias in generation.biases.items():
            biases |= dict.fromkeys(self.model.tokenize(text, False, False), bias)
        return {**generation.sampling, "logit_bias": biases}

    # -- tokens ----------------------------------------------------------------------------------------------------

    async def tokenize(self, texts: Sequence[str], add_special: bool, parse_special: bool) -> list[list[int]]:
        """Return the tokens of each text. `add_special` applies to the first text. Raise PromptTooLong early if the
        texts together cannot fit in the largest context."""
        self._short.prompts.check_length(*texts)

        def run() -> list[list[int]]:
            return [
                self.model.tokenize(text, add_special and not number, parse_special)
                for number, text in enumerate(texts)
            ]

        return await self.room(texts).lane.run(run)

    async def pieces(self, ids: Sequence[int]) -> Pieces:
        """Return the bytes of each token."""
        tokenizer = self.model.tokenizer
        return await self.room(ids).lane.run(lambda: [tokenizer.piece(token) for token in ids])

    @property
    def sampling_defaults(self) -> SamplingOptions:
        return self.model.sampling_defaults.options(dict(self.sampling))

    # -- slots -----------------------------------------------------------------------------------------------------

    async def slot(self, number: int, action: SlotAction, name: str) -> tuple[int, int]:
        """Save, restore or erase the last sequence of a slot. Return the number of tokens and the size of the file in
        bytes."""
        files, between = self._slots, self.scheduler.between
        assert files is not None, "checked by the settings"
        if action == "save":
            return await asyncio.wrap_future(between(lambda at: at.save(number, lambda one: files.save(name, one))))
        if action == "restore":
            return await asyncio.wrap_future(between(lambda at: at.load(number, lambda: files.load(name))))
        return await asyncio.wrap_future(between(lambda at: at.erase(number))), 0

    # -- vectors ---------------------------------------------------------------------------------------------------

    async def embed(self, texts: Sequence[str | Sequence[int]], pooling: str, normalize: bool = True) -> EmbedResult:
        """Return a vector for each text, of length 1 if `normalize`. Pooling "none" gives one vector per token."""
        model, beside = self.model, not self.embeds
        pooler = model.side_embedder if beside else model.embedder
        way = pooler.pooling(pooling)
        for text in texts:
            if isinstance(text, str):
                self._short.prompts.check_length(text)

        def run(some: Sequence[str | Sequence[int]]) -> tuple[list[F32], int]:
            ids = [model.prompt_ids(text) if isinstance(text, str) else list(text) for text in some]
            return list(model.embedder.vectors(ids, way)), sum(map(len, ids))

        vectors, tokens, steps = (
            await self._beside(pooler, texts, way) if beside else await self._in_parts(model, texts, run)
        )
        if way == "none":
            return EmbedResult([], tokens, [rows.tolist() for rows in vectors], steps)
        found = list(normalized(vectors)) if normalize and way != "rank" else vectors
        return EmbedResult([one.tolist() for one in found], tokens, steps=steps)

    async def _beside(
        self, pooler: TextPooler, texts: Sequence[str | Sequence[int]], way: Pooling
    ) -> tuple[list[F32], int, int]:
        """Return the vectors of a model that writes text, from requests to its scheduler; the number of tokens, and 0
        steps, which the scheduler counts."""
        found: list[F32] = []
        tokens, group = 0, self.scheduler.limits.parallel
        for first in range(0, len(texts), group):
            some = texts[first : first + group]
            ids = await self.room(some).lane.run(partial(self._ids, some))
            made = [_HiddenStates(len(each), pooler.config.width) for each in ids]
            requests = [
                Request(each, SamplingOptions(), 0, reuse=False, choice=number, client=ACCOUNT.get(), states=rows.take)
                for number, (each, rows) in enumerate(zip(ids, made, strict=True))
            ]
            with closing(Inbox(self.scheduler.submit, requests)) as inbox:
                while inbox.left:
                    await inbox.next()
            tokens += sum(map(len, ids))
            found += await self._vectors.run(partial(_pooled, pooler, made, way))
        return found, tokens, 0

    def _ids(self, texts: Sequence[str | Sequence[int]]) -> list[list[int]]:
        """Return the token ids of texts; raise BadRequest for an id outside the vocabulary, which would fail other
        requests."""
        found = [self.model.prompt_ids(text) if isinstance(text, str) else list(text) for text in texts]
        most = self.model.vocabulary
        if (wrong := next((id for ids in found for id in ids if not 0 <= id < most), None)) is not None:
            raise BadRequest(f"token {wrong} is not in the vocabulary", "input")
        return found

    async def rank(self, query: str, documents: Sequence[str]) -> EmbedResult:
        """Return one score for each document."""
        model = self._embedding()
        for document in documents:
            self._short.prompts.check_length(query, document)

        def run(some: Sequence[str]) -> tuple[list[float], int]:
            tokenizer, data = model.tokenizer, model.file.metadata
            tokens = sum(
                len(rank_pair(tokenizer, data, query, document)) for document in some
            )  # each pair includes the query
            return [float(score) for score in model.rank(query, some)], tokens

        scores, tokens, steps = await self._in_parts(model, documents, run, len(query))
        return EmbedResult([[score] for score in scores], tokens, steps=steps)

    async def _in_parts(
        self, model: Model, texts: Sequence[P], run: Callable[[Sequence[P]], tuple[list[R], int]], each: int = 0
    ) -> tuple[list[R], int, int]:
        """Run a job on batches of texts, so that the jobs of other clients can run in between.

        Return the results, the number of tokens, and the number of steps. `each` is added to the length of each text.
        """

        def counted(some: Sequence[P]) -> tuple[list[R], int, int]:
            before = model.engine.steps
            results, count = run(some)
            return results, count, model.engine.steps - before

        found: list[R] = []
        tokens = steps = first = 0
        while first < len(texts):
            last, size = first, 0
            while last < len(texts) and (last == first or size + len(texts[last]) + each <= PART):
                size += len(texts[last]) + each
                last += 1
            results, count, passes = await self._vectors.run(partial(counted, texts[first:last]))
            found, tokens, steps, first = found + results, tokens + count, steps + passes, last
        return found, tokens, steps

    def _embedding(self) -> Model:
        if not self.embeds:
            raise NotSupported(
                Notice("this server was started for text; for embeddings, start it with ", Setting("embeddings"))
            )
        return self.model

    @property
    def bytes(self) -> int:
        """The memory of weights, KV cache and scratch, including a draft model."""
        return self.model.facts.bytes

    def close(self) -> None:
        """End the scheduler, and free the model."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._child is not None:
            self._child.close()  # also ends a running compilation
        if self.model.multimodal is not None:
            self.model.multimodal.stop_decoding()
        rooms = (self._short, self._large, self._media)
        for lane in (*(room.lane for room in rooms), self._grammars, self._breakers, self._vectors):
            lane.close()
        if self._child is not None:
            self._child.close()
        self._large.prompts.close()
        self._media.prompts.close()
        self.model.close()


class _HiddenStates:
    """The hidden states of a text, which arrive in parts, and again after a preemption."""

    def __init__(self, tokens: int, width: int) -> None:
        self.rows = np.zeros((tokens, width), np.float32)

    def take(self, start: int, rows: F32) -> None:
        self.rows[start : start + len(rows)] = rows


def _pooled(pooler: TextPooler, states: Sequence[_HiddenStates], way: Pooling) -> list[F32]:
    return [pooler.pooler(each.rows, way) for each in states]


def tools_of(turn: Turn) -> list[Mapping[str, Any]]:
    """Return the tools that the model sees."""
    tools = [] if turn.tool_choice == "none" else list(turn.tools)
    if turn.forced_tool:
        tools = [tool for tool in tools if tool["function"]["name"] == turn.forced_tool]
        if not tools:
            raise BadRequest(f"tool_choice names {turn.forced_tool!r}, which is not among the tools", "tool_choice")
    return tools


@dataclass(frozen=True, slots=True)
class Prepared:
    """The requests for the choices of one prompt, and a factory for readers of their output."""

    requests: Sequence[Request]
    readers: Callable[[], AnswerReader | None]


@dataclass(frozen=True, slots=True)
class Room:
    """The lane and prompt builder for prompts of one size."""

    prompts: Prompts
    lane: Lane


@dataclass(frozen=True, slots=True)
class _Words:
    """The model's interface for constraints, with a different grammar compiler."""

    tokenizer: Tokenizer
    grammars: GrammarVocabulary


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, the factory for readers of its output, and its structural options."""

    request: Request
    readers: Callable[[], AnswerReader]
    asked: ConstraintSpec
    template: ChatTemplate
    tail: str


def _several(request: Request, count: int) -> list[Request]:
    """Return `count` requests for the same prompt, with consecutive seeds."""
    if count == 1:
        return [request]
    seed = request.sampling.seed
    seeds = [seed + number if seed >= 0 else -1 for number in range(count)]
    return [
        replace(request, choice=number, sampling=replace(request.sampling, seed=one % 2**64 if one >= 0 else one))
        for number, one in enumerate(seeds)
    ]
