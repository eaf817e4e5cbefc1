"""The speedup of speculative decoding, for `localllm bench`: greedy decoding of three texts, alternately plain and
speculative.

The speed is in tokens/s from the first to the last token, including the time of drafting. Both modes must generate the
same text.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter_ns

from localllm.base.errors import LocalLLMError
from localllm.model import Model

TEXTS = {  # the first text repeats itself, the second a little, the third not at all
    "code": (
        "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return "
        "width * height * depth\n\n\ndef perimeter(width, height):\n    return 2 * width + 2 * height\n\n\ndef surface("
        "width, height, depth):\n"
    ),
    "dialogue": (
        "User: Could you find me a table for two tonight?\nAssistant: Of course. What time would you like to eat?\n"
        "User: At seven, and somewhere quiet please.\nAssistant: There is a quiet place by the river. Is that fine?\n"
        "User: Yes, please. What is the address?\nAssistant:"
    ),
    "prose": (
        "Once upon a time there was a small harbour at the end of a long road. In winter the boats lay upside down on "
        "the beach, and the children climbed on them and looked out for ships. One morning"
    ),
}
LONGEST_TEXT = 512  # maximum tokens per text, for any vocabulary


@dataclass(frozen=True, slots=True)
class Guessed:
    """Samples for one text, one per repetition: nanoseconds plain and speculative, tokens drafted and accepted."""

    plain_ns: tuple[int, ...]
    guessed_ns: tuple[int, ...]
    drafted: int
    accepted: int
    rounds: int  # number of verify steps
    gaps_ns: tuple[int, ...]  # inter-token latencies of the speculative runs


def measure_speculation(model: Model, text: str, count: int, repetitions: int, warm_up: bool) -> Guessed:
    """Time `count` tokens after the first token, with and without speculation.

    Raise LocalLLMError if the two modes generate different texts, which would be a bug.
    """
    speculation, ids = model.speculation, model.tokenize(TEXTS[text])
    times: dict[bool, list[int]] = {False: [], True: []}
    gaps: list[int] = []
    drafted = accepted = rounds = 0

    def answer(guessing: bool) -> tuple[list[int | None], int]:
        nonlocal drafted, accepted, rounds
        model.draft_with(speculation if guessing else None)
        with model.generate(ids, temperature=0, max_tokens=count + 1, ignore_eos=True) as reply:
            said = [next(reply).token]
            moments = [perf_counter_ns()]
            for piece in reply:
                said.append(piece.token)
                moments.append(perf_counter_ns())
            taken = moments[-1] - moments[0]
        if guessing:
            # The last time is left out, since the last piece has no token.
            gaps.extend(after - before for before, after in pairwise(moments[:-1]))
        usage = reply.usage
        drafted, accepted, rounds = drafted + usage.drafted, accepted + usage.accepted, rounds + usage.rounds
        return said, taken

    try:
        if warm_up:
            answer(True)
            drafted = accepted = rounds = 0
            gaps.clear()
        for number in range(repetitions):
            answers = {}
            for guessing in (False, True) if number % 2 else (True, False):  # alternate, for a fair comparison
                answers[guessing], taken = answer(guessing)
                times[guessing].append(taken)
            if answers[False] != answers[True]:
                raise LocalLLMError(f"speculative and plain answers to the {text} differ; please report this model")
    finally:
        model.draft_with(speculation)
    return Guessed(tuple(times[False]), tuple(times[True]), drafted, accepted, rounds, tuple(gaps))
