"""When waiting requests take the slots of finished rows: the schedule of a rollout, on the host.

Nothing here knows a tensor. A step is one forward of the decode loop, for every active row.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A prefill waits until this share of the slots is free: larger prefills are more efficient, but
# on average half of that share idles. Over 1,024 answers of geometric length (mean 96, at most
# 256) in 32, 128 and 512 slots, decode steps are within 3 % of an ideal refill's.
_REFILL_SHARE = 16
# Steps between looks at the finish flags, for answers of a mean length: a finished row is seen
# one burst and a half later on average, and 1.5 steps of 64 are what may be lost.
_MEAN_LENGTH_PER_STEP = 64


def ideal_refill(lengths: Sequence[int], slots: int) -> int:
    """Decode steps of a schedule that refills each slot at the very next step, in list order.

    A request's first token comes from its prefill; each later one takes its slot one step.

    Args:
        lengths: tokens of each answer, at least 1.
        slots: rows decoded at once.
    """
    free_at = [0] * min(slots, len(lengths))
    for length in lengths:
        heapq.heapreplace(free_at, free_at[0] + length - 1)
    return max(free_at, default=0)


class Pace(NamedTuple):
    """How the host follows the device.

    Attributes:
        most_steps: steps between looks at the finish flags, at most.
        late: a look's result is read after the next burst has been launched, so that the
            device never waits for the host.
    """

    most_steps: int = 1
    late: bool = False


@dataclass(slots=True)
class Row:
    """What the host knows of an active row without reading the device.

    Attributes:
        request: whose answer it is.
        offset: position of the row's token minus the step number.
        born: step after which it has drawn its first token.
        limit: most tokens of its answer.
    """

    request: int
    offset: int
    born: int
    limit: int

    @property
    def last_step(self) -> int:
        """Steps after which the answer has reached its limit, if nothing stopped it."""
        return self.born + self.limit - 1


class Refill:
    """The schedule of one rollout. Decisions follow from what was drawn, never from the clock:
    ranks that share their rows decide alike.

    Attributes:
        waiting: requests that have not started, in the order in which they will.
        rows: the active rows.
        step: decode steps so far.
        row_steps: active rows x decode steps.

    Args:
        order: of the requests.
        limits: most tokens of each request's answer.
        slots: rows decoded at once.
        pace: how the host follows the device.
    """

    def __init__(self, order: Sequence[int], limits: Sequence[int], slots: int, pace: Pace) -> None:
        self.waiting = deque(order)
        self.rows: list[Row] = []
        self.step = 0
        self.row_steps = 0
        self._limits = limits
        self._slots = slots
        self._pace = pace
        self._ended = 0
        self._ended_tokens = 0

    @property
    def free(self) -> int:
        """Slots without a row."""
        return self._slots - len(self.rows)

    def worthwhile(self, tokens: int, enough: int) -> bool:
        """Whether a prefill should run now.

        Args:
            tokens: of the prompts that would fill the free slots, about.
            enough: tokens of a prefill that a larger one hardly beats.
        """
        if not self.waiting or not self.free:
            return False
        share = min(max(1, self._slots // _REFILL_SHARE), len(self.waiting))
        return not self.rows or self.free >= share or tokens >= enough

    def start(self, request: int, position: int, drawn: bool) -> None:
        """Give a request the next free row.

        Args:
            request: no longer waiting.
            position: of the token that its next step runs.
            drawn: its first token is there already; else the next step draws it.
        """
        born = self.step if drawn else self.step + 1
        self.rows.append(Row(request, position - self.step, born, self._limits[request]))

    def burst(self) -> int:
        """Steps to run before the next look at the finish flags."""
        ends = [row.last_step - self.step for row in self.rows]
        # The last end is also the last step that can be needed.
        most = min(self._pace.most_steps, max(ends))
        if self.waiting:
            most = min(most, min(ends))
        return max(0, min(most, max(1, self._mean_length() // _MEAN_LENGTH_PER_STEP)))

    def advance(self) -> None:
        """Count one step of the active rows."""
        self.step += 1
        self.row_steps += len(self.rows)

    def retire(self, ended: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Take out rows that have ended, or reached their limit: the last rows take their places.

        Args:
            ended: tokens of each request whose end was seen; it may have been taken out before.

        Returns:
            Old and new indices of the rows that moved.
        """
        rows = self.rows
        gone = []
        for index, row in enumerate(rows):
            if row.request in ended or row.last_step <= self.step:
                gone.append(index)
                self._ended += 1
                self._ended_tokens += ended.get(row.request, row.limit)
        left = len(rows) - len(gone)
        targets = [index for index in gone if index < left]
        holes = set(gone)
        sources = [index for index in range(left, len(rows)) if index not in holes]
        for source, target in zip(sources, targets, strict=True):
            rows[target] = rows[source]
        del rows[left:]
        return sources, targets

    def _mean_length(self) -> int:
        """Of the answers that have ended; before any has, of the limits."""
        if self._ended:
            return self._ended_tokens // self._ended
        return sum(row.limit for row in self.rows) // len(self.rows)
