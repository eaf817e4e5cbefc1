"""Prompt-lookup drafts: the tokens that followed the same n-gram earlier in the text. No model is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localllm.generation.speculation.rule import DraftToken
from localllm.sampling.sampler import Sampler

SHORTEST = 3  # minimum number of matching tokens
LONGEST = 16  # maximum number of tokens compared
PLACES = 8  # maximum number of earlier positions searched, newest first

# Prior acceptance rates after 3, 4, ... 16 matching tokens.
PRIORS = tuple(min(0.9, 0.3 + 0.1 * n) for n in range(LONGEST - SHORTEST + 1))


class NgramDrafter:
    """Indexes a text by its n-grams of SHORTEST tokens. The cost of drafting is negligible."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # n-gram of SHORTEST tokens -> positions after it

    def begin(self, text: Sequence[int]) -> None:
        shared = next((i for i, pair in enumerate(zip(self._text, text, strict=False)) if pair[0] != pair[1]), None)
        if shared is not None or len(text) < len(self._text):
            self._text.clear()
            self._places.clear()
        for token in text[len(self._text) :]:
            self.accept(token)

    def accept(self, token: int) -> None:
        self._text.append(token)
        if len(self._text) > SHORTEST:  # at the end of the text, no token follows yet
            before = tuple(self._text[-SHORTEST - 1 : -1])
            self._places.setdefault(before, []).append(len(self._text) - 1)

    def propose(self, sampler: Sampler) -> Iterator[DraftToken]:
        """Yield the tokens that followed the longest match; of equally long matches, the newest counts.

        A continuation that reaches the end of the text continues with the drafted tokens.
        """
        text = self._text
        alike, place = self._longest()
        if alike < SHORTEST:
            return
        guessed: list[int] = []
        while True:
            token = text[place] if place < len(text) else guessed[place - len(text)]
            guessed.append(token)
            yield DraftToken(token, min(alike, LONGEST) - SHORTEST)
            place, alike = place + 1, alike + 1

    def _longest(self) -> tuple[int, int]:
        """Return (number of matching tokens, position of the next token) for the best earlier position."""
        text, best = self._text, (0, 0)
        places = self._places.get(tuple(text[-SHORTEST:]), ())
        for place in reversed(places[-PLACES:]):
            alike = SHORTEST
            while alike < LONGEST and alike < place and text[place - 1 - alike] == text[-1 - alike]:
                alike += 1
            best = max(best, (alike, place), key=lambda found: found[0])
        return best
