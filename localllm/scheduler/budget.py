"""How many prompt tokens a step may take, so that those who read an answer do not wait long for the next token.

The costs of steps are measured as they run. A step of d decoding rows and p prompt rows is expected to take
decode(d) + p * row seconds.
"""

from __future__ import annotations

LEAST = 16  # prompt rows in a step: fewer read the weights too often
MOST_PATIENCE = 2.5
LEAST_SHARE = 2.0  # a step may take this many times what its answers take: many answers leave prompts their half
_WEIGHT = 0.1  # of the newest step
_WORST = 4.0  # a stall of the machine counts as at most this many times the expected cost


class Budget:
    """Chooses prompt rows for steps of at most `rows` rows, `seconds` long while answers are being written."""

    def __init__(self, rows: int, seconds: float) -> None:
        self.rows, self.seconds = rows, seconds
        self._row = 0.0  # seconds per prompt row; 0: not measured yet
        self._decode = 0.0  # seconds of a step without prompt rows

    def prompt_rows(self, decoding: int, waiting: int = 1) -> int:
        """Return the number of prompt rows beside `decoding` rows of answers; unlimited if nobody reads.

        Steps may take longer than `seconds` if more prompts wait than answers are written (up to MOST_PATIENCE times),
        and if the answers alone take more than half of it.
        """
        most = self.rows - decoding
        if not decoding:
            return most
        if not self._row:
            return min(most, 4 * LEAST)
        patience = min(MOST_PATIENCE, max(1.0, waiting / decoding))
        longest = max(patience * self.seconds, LEAST_SHARE * self._decode)
        wanted = int((longest - self._decode) / self._row)
        return max(0, min(most, max(LEAST, wanted - wanted % LEAST)))

    def observe(self, decoding: int, prompt: int, seconds: float) -> None:
        """Record a step."""
        if not prompt:
            self._decode = _mixed(self._decode, seconds)
        elif prompt >= LEAST:
            rest = seconds - (self._decode if decoding else 0.0)
            self._row = _mixed(self._row, max(rest, 0.1 * seconds) / prompt)


def _mixed(old: float, new: float) -> float:
    return old + _WEIGHT * (min(new, _WORST * old) - old) if old else new
