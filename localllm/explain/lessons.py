"""Conclusions from the measurements of an answer, in sentences. The page and the terminal show the same sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from localllm.explain.account import Account, Phase, Spent
from localllm.explain.text import amount, plural, share, time
from localllm.plan import BLOCK

MUCH = 0.2  # share of the time spent waiting from which a lesson mentions it


class Lesson(NamedTuple):
    title: str
    text: str


def lessons(account: Account) -> list[Lesson]:
    """Return the conclusions from an account. A conclusion without data is omitted."""
    found = [
        Lesson("Prompt", " ".join(_prompt(account))),
        Lesson("Decoding", " ".join(_decoding(account))),
        Lesson("Cache", " ".join(_cache(account))),
        Lesson("Speculation", " ".join(_speculation(account))),
        Lesson("Sampling", " ".join(_sampling(account))),
    ]
    return [lesson for lesson in found if lesson.text]


def _prompt(account: Account) -> Iterator[str]:
    phase, record = account.phase("prompt"), account.record
    if record.reused:
        blocks = plural(record.reused_blocks, "block")
        yield f"{record.reused} of {plural(len(record.prompt), 'token')} were in the cache already, in {blocks}."
    if phase is None:
        return
    rate = amount(phase.rows / phase.seconds, "tokens/s")
    yield f"{plural(phase.rows, 'token')} in {plural(len(phase.steps), 'chunk')} took {time(phase.seconds)} ({rate})."
    yield from _limits(phase, "the prompt")


def _decoding(account: Account) -> Iterator[str]:
    phase = account.phase("decoding")
    if phase is None:
        return
    count = len(phase.steps)
    each = phase.whole.bytes / count
    passes, mean = plural(count, "pass"), " on average" if count > 1 else ""
    yield f"{passes} of one token took {time(phase.seconds / count)}{mean} and read {amount(each, 'B')}{mean}."
    yield from _limits(phase, "decoding", count)
    if phase.whole.bound == "memory" and phase.whole.compute_seconds:
        rows = phase.whole.memory_seconds / phase.whole.compute_seconds
        if rows >= 2:
            yield f"While one row is read, {rows:.0f} could be multiplied. Drafts, batches and prompts gain from this."
    if account.clocked:
        inside = phase.whole.seconds / phase.seconds
        yield f"Kernels ran {share(inside)} of this time; the rest is the Python around them."
        waited = phase.whole.waited / phase.whole.seconds if phase.whole.seconds else 0.0
        if waited >= MUCH:
            yield (
                f"In {share(waited)} of the kernels' time the first thread waited for another: the machine is busy, "
                "or a pass is too short for this number of threads."
            )


def _limits(phase: Phase, what: str, parts: int = 1) -> Iterator[str]:
    """Compare the time with the minimum for reading and multiplying at the measured limits."""
    whole: Spent = phase.whole
    if not whole.bytes:
        return
    yield f"Each byte read serves {whole.intensity:.1f} operations."
    if not whole.bound:
        return
    reading, multiplying = time(whole.memory_seconds / parts), time(whole.compute_seconds / parts)
    limits = f"Reading alone takes {reading} at this machine's best, multiplying alone {multiplying}"
    if whole.bound == "waiting":
        waited = share(whole.waited / whole.seconds)
        yield f"{limits}; but threads waited for each other {waited} of the time, so {what} is limited by waiting."
    else:
        yield f"{limits}, so {what} is bound by {whole.bound}."


def _cache(account: Account) -> Iterator[str]:
    record, later = account.record, account.record.later("model")
    if not record.held:
        return
    used = -(-record.held // BLOCK)
    each = amount(account.cache_per_token, "B")
    yield f"The cache holds {plural(record.held, 'token')} in {used} of {plural(account.blocks, 'block')}, {each} each."
    if not later:
        return
    last = later[-1]
    read, whole = account.cache_bytes(last), sum(cost.bytes(last) for cost in account.costs)
    yield f"The last pass read {amount(read, 'B')} of it, {share(read / whole)} of its bytes."
    with_it = sum(cost.operations(last) for cost in account.costs) / len(last.tokens)
    yield (
        f"Without a cache, this token would take {amount(account.operations_without_cache(), 'op')} "
        f"instead of {amount(with_it, 'op')}."
    )


def _speculation(account: Account) -> Iterator[str]:
    drafts = account.drafts
    if drafts is None:
        return
    if not drafts.rounds:
        yield "No draft was verified."
        return
    yield (
        f"{drafts.accepted} of {plural(drafts.drafted, 'verified draft')} were accepted; "
        f"{plural(drafts.passes, 'pass')} of the model made {plural(drafts.tokens, 'token')}."
    )
    if drafts.one_row:
        yield f"A pass of one row took {time(drafts.one_row)}, a verifying pass {time(drafts.several_rows)}."
    if drafts.drafting:
        yield f"The draft model took {time(drafts.drafting)}."
    yield f"Estimated speed: x{account.usage.speedup:.2f} of plain decoding."


def _sampling(account: Account) -> Iterator[str]:
    choices = account.record.choices
    if not choices:
        return
    sure = [choice.of(choice.token).model for choice in choices]
    left = [choice.stages[-1].left if choice.stages else choice.others for choice in choices]
    likeliest = sum(choice.candidates[0].token == choice.token for choice in choices)
    tokens = plural(len(choices), "token")
    yield f"Of {tokens} chosen, {likeliest} were the model's top choice; average probability {share(_mean(sure))}."
    whole = choices[0].others + len(choices[0].candidates)
    yield f"The samplers left {_mean(left):.1f} of {whole} candidates on average."
    if len(sure) > 1:
        at = min(range(len(sure)), key=lambda n: sure[n])
        yield f"The least expected token was number {at + 1}, with {share(sure[at])}."


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)
