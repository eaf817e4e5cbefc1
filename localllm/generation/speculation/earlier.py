"""Earlier answers to draft from, as the option `draft_earlier` allows. A request sees only answers of its account.

Speed would otherwise tell one account what another one's answers contain. Tokens are counted over all accounts. An
account has two automata. The newer one grows, and becomes the older one when it holds a third of the allowed tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from localllm.generation.speculation.automaton import END, START, Context, SuffixAutomaton

PROMPT = 32  # tokens of the prompt's end that are kept with an answer, so that its first tokens have a context
MOST_ACCOUNTS = 1000  # maximum number of accounts with answers or a running request; an empty automaton takes 3 KB
INDEXED = 256  # maximum number of tokens indexed before one draft, so that a long answer does not delay a step


class EarlierAnswers:
    """The earlier answers of one account: at most `most` tokens."""

    def __init__(self, most: int) -> None:
        self._part = most // 3
        self._waiting: deque[int] = deque(maxlen=self._part)
        self._newer, self._older = SuffixAutomaton(), SuffixAutomaton()

    @property
    def waiting(self) -> int:
        """Number of tokens not yet indexed."""
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        return self.waiting + sum(each.tokens for each in self.automata)

    @property
    def automata(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
        return self._newer, self._older

    def add(self, tokens: Sequence[int], prompt: int) -> None:
        """Add the answer of a request; the first `prompt` of its `tokens` are the prompt."""
        self._waiting.extend(tokens[max(0, prompt - PROMPT) :])
        self._waiting.append(END)

    def index(self) -> None:
        """Index the oldest waiting tokens."""
        for _ in range(min(INDEXED, len(self._waiting))):
            if self._newer.tokens >= self._part:
                self._newer, self._older = SuffixAutomaton(), self._newer
            if not self._newer.extend(self._waiting.popleft()):
                self._newer = SuffixAutomaton()


class Following:
    """The longest end of a request's text that occurs in earlier answers."""

    def __init__(self, answers: EarlierAnswers, text: Sequence[int]) -> None:
        self._answers = answers
        self._recent = deque(text[-PROMPT:], PROMPT)
        self._at: dict[SuffixAutomaton, tuple[Context, int]] = {}  # with the automaton's size when it was searched

    def accept(self, token: int) -> None:
        """Move on by one token of the text."""
        self._recent.append(token)
        self._at = {each: (each.after(at, token), size) for each, (at, size) in self._at.items()}

    def longest(self) -> tuple[SuffixAutomaton, Context]:
        """Return the automaton with the longest matching end, and that end. Indexes answers that wait."""
        self._answers.index()
        self._at = {each: (self._found(each), each.tokens) for each in self._answers.automata}
        best = max(self._at, key=lambda each: self._at[each][0].length)
        return best, self._at[best][0]

    def _found(self, automaton: SuffixAutomaton) -> Context:
        """Return the longest end in an automaton. Tokens added since the last search may contain a longer one."""
        known, size = self._at.get(automaton, (START, -1))
        if size == automaton.tokens:
            return known
        found = START
        for token in self._recent:
            found = automaton.after(found, token)
        return max(known, found, key=lambda context: context.length)


class EarlierByAccount:
    """Earlier answers of every account, at most `most` tokens in all. The least recently used account goes first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._accounts: dict[str, EarlierAnswers] = {}  # the most recently used one is the last

    def of(self, account: str) -> EarlierAnswers:
        """Return the answers of an account."""
        found = self._accounts.pop(account, None) or EarlierAnswers(self._most)
        self._accounts[account] = found
        if len(self._accounts) > MOST_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        return found

    def add(self, account: str, tokens: Sequence[int], prompt: int) -> None:
        """Add an answer; see `EarlierAnswers.add`."""
        self.of(account).add(tokens, prompt)
        while len(self._accounts) > 1 and sum(each.tokens for each in self._accounts.values()) > self._most:
            del self._accounts[next(iter(self._accounts))]
