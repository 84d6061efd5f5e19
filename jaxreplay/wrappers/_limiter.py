"""Limiter: keeps the number of drawn items near a fixed ratio of the number of added items.

**Rule.** Draws begin when enough items are stored. Let A and D be the numbers of items added and drawn since then. The
balance is ratio * A - D, the number of items that may still be drawn. An addition passes if the balance after it is at
most slack, and a draw if it is at least -slack. So whoever is ahead waits, and the balance stays in [-slack, slack].
This is the rate limiter of Reverb (Cassirer et al. 2021, Reverb: A Framework For Experience Replay, arXiv:2102.04736),
with slack as its error buffer.

**No deadlock.** A call changes the balance by `up` >= 0 (additions) or by -`down` <= 0 (draws). If an addition and a
draw both have to wait, slack - up < balance < down - slack, which needs 2 slack < up + down. So 2 slack must be at
least the sum of the largest `up` and the largest `down`. A given slack that is smaller is an error of the first call
that shows it. The default is the sum itself: each side can be one call ahead. It grows with the calls.

**Exact.** The ratio is a fraction of integers, and all numbers are Python integers, so nothing is rounded. They count
units of 1 / denominator.
"""

import math
from fractions import Fraction


class Limiter:
    """Counts added and drawn items, and applies the rule; not safe for threads by itself.

    Attributes:
      ratio: items drawn for each item added; None for no limit.
      began: True once draws have begun; from the start with the counts of an earlier limiter.
      added, drawn: number of items since draws began, or until then; not counted without a ratio.
    """

    def __init__(self, ratio: float | None, slack: float | None, added: int = 0, drawn: int = 0):
        self.ratio, self.began, self.added, self.drawn = ratio, added + drawn > 0, added, drawn
        self._num, self._den = Fraction(ratio or 0).as_integer_ratio()
        self._slack = None if slack is None else math.floor(Fraction(slack) * self._den)
        self._most_up, self._most_down = 0, 0

    @property
    def slack(self) -> float:
        """The largest absolute balance."""
        return self._bound() / self._den

    @property
    def balance(self) -> float:
        """Number of items that may still be drawn; negative if the draws are ahead."""
        return self._balance() / self._den

    def begin(self) -> None:
        """Allow draws from now on."""
        if not self.began:
            self.began, self.added = True, 0

    def register(self, added: int, drawn: int) -> None:
        """Note the size of a call before it waits; a `ValueError` if it might wait for ever with the given slack."""
        if self.ratio is None or not self.began:
            return
        change = self._change(added, drawn)
        up, down = max(self._most_up, change), max(self._most_down, -change)
        if self._slack is not None and 2 * self._slack < up + down:
            found = f"slack={self.slack:g}: adding {up / self._den / self.ratio:g} and drawing {down / self._den:g}"
            raise ValueError(f"{found} could wait for ever; use slack={-(-(up + down) // (2 * self._den))}, or None.")
        self._most_up, self._most_down = up, down

    def passes(self, added: int, drawn: int) -> bool:
        """True if a call with these counts may pass now."""
        if not self.began:
            return drawn == 0
        change = 0 if self.ratio is None else self._change(added, drawn)
        after = self._balance() + change
        return change == 0 or (after <= self._bound() if change > 0 else after >= -self._bound())

    def count(self, added: int, drawn: int) -> None:
        """Count a call that has passed."""
        if self.ratio is not None:
            self.added, self.drawn = self.added + added, self.drawn + drawn

    def text(self) -> str:
        """The counts as text for messages."""
        if self.ratio is None:
            return "no ratio"
        if not self.began:
            return f"ratio={self.ratio:g}, {self.added} items added; draws have not begun"
        side = "draws" if self.balance < 0 else "additions"
        ahead = f"the {side} are ahead by {abs(self.balance):g} draws" if self.balance else "no one is ahead"
        found = f"ratio={self.ratio:g}, {self.added} items added and {self.drawn} drawn since draws began"
        return f"{found}; {ahead}, slack={self.slack:g}"

    def _change(self, added: int, drawn: int) -> int:
        return self._num * added - self._den * drawn

    def _balance(self) -> int:
        return self._change(self.added, self.drawn) if self.began else 0

    def _bound(self) -> int:
        return self._most_up + self._most_down if self._slack is None else self._slack
