"""The sampler of one conversation: token history, random generator, and the sampler chain.

Plain and speculative decoding share `distribution`, which may be called repeatedly. Only `write` changes the state that
later tokens depend on. Drafted tokens are therefore verified one by one, with the same Mirostat state as in plain
decoding.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localllm.engine.top_k import Doubles, Ids
from localllm.options import SamplingOptions
from localllm.sampling.chain import (
    HIGHEST,
    SAMPLERS,
    Candidates,
    SamplerStage,
    SamplingContext,
    changed,
    enabled,
    enabled_names,
    quick_draw,
    softmax,
)
from localllm.sampling.errors import SamplingError
from localllm.sampling.feedback import Feedback
from localllm.sampling.infill import Spellings
from localllm.sampling.repetition import Breakers

if TYPE_CHECKING:
    from localllm.sampling.constraint import Constraint


_MANY = 4096  # number of candidates below which float64 probabilities are as fast


class Sampler:
    """Samples tokens according to `options`. `seed` is the seed in use, even if the options do not set it."""

    def __init__(
        self,
        options: SamplingOptions,
        dry_breakers: Breakers | None = None,
        suppressed: Iterable[int] = (),
        spellings: Spellings | None = None,
    ) -> None:
        """`dry_breakers` comes from find_dry_breakers() for the vocabulary; only DRY needs it. Only infill needs
        `spellings`. `suppressed` tokens are never chosen, regardless of the options.
        """
        self.options = options
        self.seed = options.seed if options.seed >= 0 else secrets.randbits(32)
        self._stages = enabled(options)
        self._history: list[int] = []
        self._context = SamplingContext(
            self._history, dry_breakers or {}, self.seed, spellings, self._allows, Feedback.start(options)
        )
        self._choice: tuple[SamplerStage, Candidates, Candidates] | None = None  # the stage that adapts next
        biases = {**options.logit_bias, **dict.fromkeys(suppressed, -np.inf)}
        self._bias_ids = np.array(sorted(biases), np.int32)
        self._bias = np.array([biases[token] for token in sorted(biases)], np.float64)
        self._ids = np.arange(0, dtype=np.int32)  # token ids (V,), set when V is known
        self._bits = np.random.PCG64(self.seed)
        self._begun: Any = self._bits.state  # state of the random generator when the answer began
        self._learned: list[Feedback] = []  # feedback at the answer's start, and after each token if a stage adapts
        # Only the largest logit matters, independent of history, so one argmax is enough.
        self._argmax = options.greedy and len(self._stages) == 1 and not biases
        self._constraint: Constraint | None = None
        self._ends: Collection[int] = ()
        self._onward = False  # ignore_eos: end-of-generation tokens do not end the answer
        self._drafting = False

    # -- constraint ------------------------------------------------------------------------------------------------

    def constrain(self, constraint: Constraint | None, ends: Collection[int] = (), ignore_eos: bool = False) -> None:
        """Set the constraint of the next answer, or None, before it starts. `write` advances it.

        `ends` are the tokens that end an answer. With `ignore_eos` they are chosen only if the constraint allows
        nothing else, and without a constraint they do not end the answer.
        """
        self._constraint, self._ends, self._onward = constraint, ends, ignore_eos

    def is_end(self, token: int) -> bool:
        """Return whether a token returned by `sample` ends the answer. Such a token is not passed to `write`."""
        if token not in self._ends:
            return False
        return not self._onward or (self._constraint is not None and self._constraint.allowed() is not None)

    def write(self, token: int) -> None:
        """Accept a sampled token of the answer, and advance the constraint."""
        self.accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._choice is not None:
            stage, before, after = self._choice
            if stage.learn is not None and token in after.ids:
                stage.learn(before, after, token, self.options, self._context.feedback)
            self._learned.append(copy(self._context.feedback))
            self._choice = None

    @property
    def finished(self) -> bool:
        """Whether the constraint allows no further token."""
        return self._constraint is not None and self._constraint.finished

    def valid(self, tokens: Sequence[int]) -> int:
        """Return the number of leading drafted tokens that the constraint allows."""
        return len(tokens) if self._constraint is None else self._constraint.validate(tokens)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Suspend the constraint, which tracks the tokens of the answer and not drafts."""
        self._drafting = True
        try:
            yield
        finally:
            self._drafting = False

    def _allows(self, token: int) -> bool:
        """Return whether the constraint allows a token."""
        allowed = self._constraint.allowed() if self._constraint is not None and not self._drafting else None
        return allowed is None or bool(token < len(allowed) and allowed[token])

    def _constrained(self, candidates: Candidates) -> Candidates:
        """Return the candidates that the constraint allows; raise SamplingError if there are none."""
        allowed = self._constraint.allowed() if self._constraint is not None and not self._drafting else None
        if allowed is None:
            return candidates
        assert not candidates.descending, "a constraint needs all logits"
        allowed = allowed[: len(candidates.ids)]
        if self._onward and self._ends:
            rest = allowed.copy()
            rest[[token for token in self._ends if token < len(rest)]] = False
            allowed = rest if rest.any() else allowed
        left = candidates.take(allowed, descending=False)
        if not len(left.ids) or not abs(left.peak) < HIGHEST:
            raise SamplingError("the grammar allows no token that the model can write here; check the grammar")
        return left

    # -- tokens ----------------------------------------------------------------------------------------------------

    @property
    def required_top_k(self) -> int:
        """The k for which the top-k logits determine the next token; 0 if all logits are needed."""
        if self._constraint is not None:
            return 0
        if self._argmax:
            return 1
        cut_first = self._stages[:1] == (SAMPLERS["top_k"],) and not len(self._bias_ids)
        return self.options.top_k if cut_first else 0

    def distribution(self, logits: NDArray[np.float32]) -> tuple[Ids, Doubles]:
        """Return the possible next tokens (n,) and their probabilities (n,), which are positive and sum to 1.

        `logits` (V,) come from the model and are not changed. Raises SamplingError if they contain NaN, or if bias and
        penalties leave no token.
        """
        return _possible(self._candidates(logits))

    def _candidates(self, logits: NDArray[np.float32]) -> Candidates:
        """Return the candidates of the logits (V,) that remain after the chain."""
        refuse_broken(float(logits.max()))
        if len(self._ids) != len(logits):
            self._ids = np.arange(len(logits), dtype=np.int32)
        return self._left(self._constrained(self._biased(Candidates(self._ids, logits))))

    def _left(self, candidates: Candidates) -> Candidates:
        for stage in self._stages:
            left = stage.run(candidates, self.options, self._context)
            if stage.learn is not None and not self._drafting:
                self._choice = stage, candidates, left
            candidates = left
        return candidates

    def stages(self, logits: NDArray[np.float32]) -> Iterator[tuple[str, Candidates]]:
        """Yield the candidates before the chain and after each of its stages, with the stage's name.

        This changes no state. Between `sample` and `write` it reproduces the sampling of that token, which was drawn
        from the last candidates yielded.
        """
        candidates = Candidates(np.arange(len(logits), dtype=np.int32), logits)
        yield "logits", candidates
        if len(self._bias_ids):
            candidates = self._biased(candidates)
            yield "logit_bias" if self.options.logit_bias else "suppressed", candidates
        if self._constraint is not None:
            candidates = self._constrained(candidates)
            yield "grammar", candidates
        for name in enabled_names(self.options):
            candidates = SAMPLERS[name].run(candidates, self.options, self._context)
            yield name, candidates

    def draw(self, ids: Ids, probabilities: Doubles) -> int:
        """Draw one of `ids` by inverting the cumulative sum of `probabilities`, in order, with one random number."""
        return _at(ids, probabilities, self.uniform())

    def uniform(self) -> float:
        """Return the next random number in [0, 1): the upper 53 bits of PCG64, identical in every NumPy version."""
        return (self._bits.random_raw() >> 11) * 2.0**-53

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Sample the next token without accepting it."""
        if self._argmax:
            token = int(logits.argmax())
            refuse_broken(float(logits[token]))
            if self._constraint is None or self._drafting:
                return token
            return self._greedy(logits)
        candidates = self._candidates(logits)
        if len(candidates.ids) < _MANY:
            return self.draw(*_possible(candidates))
        uniform = self.uniform()
        quick = quick_draw(candidates, uniform)
        return quick if quick is not None else _at(*_possible(candidates), uniform)

    def _greedy(self, logits: NDArray[np.float32]) -> int:
        """Return the most likely token that the constraint allows."""
        left = self._constrained(Candidates(np.arange(len(logits), dtype=np.int32), logits))
        return int(left.ids[left.logits.argmax()])

    def sample_top_k(self, ids: Ids, logits: NDArray[np.float32]) -> int:
        """Sample the next token from the `required_top_k` largest logits (n,), which are in descending order, ties by
        id, NaN first.
        """
        refuse_broken(float(logits[0]))
        return int(ids[0]) if self._argmax else self.draw(*_possible(self._left(Candidates(ids, logits, True))))

    def accept(self, token: int) -> None:
        """Append a token of the prompt or the answer to the history for penalties and DRY."""
        self._history.append(token)

    def reset(self) -> None:
        """Clear the token history and restart the random generator."""
        self._history.clear()
        self._bits = np.random.PCG64(self.seed)
        self._choice = None
        self._context = replace(self._context, feedback=Feedback.start(self.options))

    def begin(self) -> None:
        """Begin an answer whose prompt repeats the history. Random generator and feedback state continue."""
        self._history.clear()
        self._begun, self._learned = self._bits.state, [copy(self._context.feedback)]

    def rewound(self, tokens: int) -> Sampler:
        """Return a copy of this sampler in the state it had `tokens` tokens after `begin`, without its history.

        The core may have sampled more tokens than were read, and may be sampling one at this moment.
        """
        other = copy(self)
        other._history, other._choice, other._constraint = [], None, None
        other._bits = np.random.PCG64(self.seed)
        other._bits.state = self._begun
        if not self._argmax:  # each token takes one random number unless sampling is argmax only
            other._bits.advance(tokens)
        feedback = copy(self._learned[min(tokens, len(self._learned) - 1)])
        other._context = replace(self._context, history=other._history, allows=other._allows, feedback=feedback)
        return other

    def snapshot(self) -> int:
        """Return the state for `restore`, which removes all later tokens (the random generator is not rewound)."""
        return len(self._history)

    def restore(self, snapshot: int) -> None:
        assert snapshot <= len(self._history), "the snapshot has a longer history"
        del self._history[snapshot:]

    def _biased(self, candidates: Candidates) -> Candidates:
        if not len(self._bias_ids):
            return candidates
        if self._bias_ids[-1] >= len(candidates.ids):
            raise SamplingError(
                f"logit_bias names token {self._bias_ids[-1]}, but the model has tokens 0 to {len(candidates.ids) - 1}"
            )
        return changed(candidates, self._bias_ids, lambda logits, which: logits + self._bias[which])


def _possible(candidates: Candidates) -> tuple[Ids, Doubles]:
    """Return the candidates (n,) with a probability above 0, and the probabilities (n,)."""
    probabilities = softmax(candidates)
    if np.count_nonzero(probabilities) == len(probabilities):
        return candidates.ids, probabilities
    possible = probabilities > 0
    return candidates.ids[possible], probabilities[possible]


def _at(ids: Ids, probabilities: Doubles, uniform: float) -> int:
    """Return the id at which the cumulative sum of `probabilities` exceeds the fraction `uniform` of the total."""
    sums = probabilities.cumsum()
    return int(ids[sums.searchsorted(uniform * sums[-1], side="right")])


def refuse_broken(peak: float) -> None:
    """Raise SamplingError if `peak`, the largest logit, is unusable; it is NaN if any logit is NaN."""
    if not abs(peak) < HIGHEST:
        raise SamplingError(
            f"the model's largest logit is {peak}: its weights are probably damaged or the file was converted wrongly; "
            "compare the file's checksum with the publisher's, or try another conversion"
        )
