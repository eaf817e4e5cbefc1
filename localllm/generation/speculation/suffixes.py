"""Drafts without a model: the tokens that most often followed the longest repeated end of the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localllm.generation.speculation.automaton import END, RATES, START, SuffixAutomaton
from localllm.generation.speculation.earlier import Following
from localllm.generation.speculation.rule import DraftToken
from localllm.sampling.sampler import Sampler

INDEXED = 512  # maximum number of tokens that all requests index in a step, so that long prompts do not delay it
PRIORS = 2 * RATES  # of drafts from the request's own text, and of drafts from earlier answers


class SuffixDrafter:
    """Drafts for one text from its own repetitions, and from earlier answers where these match a longer end of it."""

    def __init__(self, text: Sequence[int] = (), earlier: Following | None = None) -> None:
        """Start with a text, which is indexed when drafts are wanted."""
        self.text = list(text)
        self._indexed = 0  # number of leading tokens in the automaton
        self._own, self._earlier = SuffixAutomaton(), earlier

    def accept(self, token: int) -> None:
        """Append a token to the text."""
        self.text.append(token)
        if self._earlier is not None:
            self._earlier.accept(token)

    def extend(self, text: Sequence[int], earlier: Following | None) -> None:
        """Continue with a longer text that begins with the text so far, and with other earlier answers."""
        self.text, self._earlier = list(text), earlier

    @property
    def behind(self) -> int:
        """The number of tokens that are not indexed yet. Until they are, the text's repetitions give no drafts."""
        return len(self.text) - self._indexed

    def propose(self, sampler: Sampler, most: int = INDEXED) -> Iterator[DraftToken]:
        """Yield the most frequent continuation of the longest end of the text that occurred before. Index at most
        `most` tokens.
        """
        stop = self._indexed + most
        for token in self.text[self._indexed : stop]:
            if not self._own.extend(token):
                self._own = SuffixAutomaton()
                self._own.extend(token)
        self._indexed = min(stop, len(self.text))
        own = START if self.behind else self._own.repeated
        if self._earlier is not None:
            automaton, context = self._earlier.longest()
            if context.length > own.length:
                for token, trust in automaton.continuations(context, at_end=False):
                    if token == END:
                        return
                    yield DraftToken(token, len(RATES) + trust)
                return
        yield from self._own.continuations(own, at_end=True)
