"""What `rlhf verify` found, as plain data: written by the worker, printed by the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Gap:
    """|log-prob of the rollout - log-prob of the training forward| over answer tokens, in nats.

    Attributes:
        mean, max: over the tokens.
        tokens: how many were compared.
        mean_bound, max_bound: what rounding explains.
        floor_mean, floor_max: the same difference between two training forwards in different
            batch shapes; None where it was not measured.
        not_finite: tokens where the training forward gives NaN; they are not compared.
    """

    mean: float
    max: float
    tokens: int
    mean_bound: float
    max_bound: float
    floor_mean: float | None = None
    floor_max: float | None = None
    not_finite: int = 0

    @property
    def excess(self) -> float:
        """Above 1: more than rounding explains."""
        return max(self.mean / self.mean_bound, self.max / self.max_bound)

    @property
    def ok(self) -> bool:
        """Whether there is something to compare, all of it, and rounding explains the gap."""
        return self.tokens > 0 and not self.not_finite and self.excess <= 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `Gap(**values)` is equal again."""
        return asdict(self)

    def __str__(self) -> str:
        if self.not_finite:
            return (
                f"the training forward's logits are not finite at {self.not_finite} of "
                f"{self.tokens + self.not_finite} answer tokens"
            )
        if not self.tokens:
            return "no answer token was compared"
        text = (
            f"log-prob gap mean {self.mean:.2g}, max {self.max:.2g} nats over {self.tokens} "
            f"tokens (bounds {self.mean_bound:.2g}, {self.max_bound:.2g}"
        )
        if self.floor_mean is not None and self.floor_max is not None:
            text += f"; noise floor {self.floor_mean:.2g}, {self.floor_max:.2g}"
        return text + ")"


@dataclass(frozen=True, slots=True)
class Misses:
    """Tokens against the one that the training forward's distribution picks.

    Attributes:
        tokens: how many were looked at.
        misses: sampled: whose uniform lies outside the token's interval of the CDF; greedy: that
            are not the most likely token.
        mean: sampled: distance of the uniform from the interval; greedy: nats below the most
            likely token; over all tokens.
        mean_bound: what rounding explains.
        worst: the largest such distance over what rounding explains of it.
        forbidden: tokens that cannot be drawn, such as suppressed ids.
    """

    tokens: int = 0
    misses: int = 0
    mean: float = 0.0
    mean_bound: float = 0.0
    worst: float = 0.0
    forbidden: int = 0

    @property
    def ok(self) -> bool:
        """Whether rounding explains all misses."""
        return (
            self.tokens > 0
            and not self.forbidden
            and self.worst <= 1.0
            and self.mean <= self.mean_bound
        )

    def __str__(self) -> str:
        if self.forbidden:
            return (
                f"{self.forbidden} of {self.tokens + self.forbidden} tokens are suppressed ids "
                "or have no probability"
            )
        if not self.tokens:
            return "no token was looked at"
        return (
            f"{self.misses} of {self.tokens} tokens missed, by {self.mean:.2g} in the mean (bound "
            f"{self.mean_bound:.2g}), at most {self.worst:.2g} times what rounding explains"
        )


@dataclass(frozen=True, slots=True)
class Draws:
    """Whether answers were drawn as asked.

    Attributes:
        sampled, greedy: their tokens.
        answers: how many answers' ends were looked at.
        ends: one line for each that ends where it should not.
    """

    sampled: Misses
    greedy: Misses
    answers: int
    ends: list[str]

    @property
    def problems(self) -> list[str]:
        """One line for each kind of problem."""
        found = []
        if not self.sampled.ok:
            found.append(f"sampled tokens are not drawn from the policy: {self.sampled}")
        if not self.greedy.ok:
            found.append(f"greedy tokens are not the most likely ones: {self.greedy}")
        if self.ends:
            found.append(f"answers do not end where they should: {self.ending}")
        return found

    @property
    def ending(self) -> str:
        """The ends in words."""
        if not self.ends:
            return f"right ({self.answers} answers)"
        more = f" (and {len(self.ends) - 1} more)" if len(self.ends) > 1 else ""
        return f"{self.ends[0]}{more}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `Draws.from_dict` is the opposite."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The opposite of `as_dict`."""
        parts = {"sampled": Misses(**values["sampled"]), "greedy": Misses(**values["greedy"])}
        return cls(**{**values, **parts})


@dataclass(frozen=True, slots=True)
class Switch:
    """The state after one step of the path.

    Attributes:
        name: the step.
        logits_norm: Frobenius norm of the training forward's logits; None after other steps.
        bytes: device memory allocated by tensors; on the CPU the process's resident memory.
        peak_bytes: most of it during the step; on the CPU since the start of the process.
        workspace_bytes: of the peak, the KV workspace.
    """

    name: str
    logits_norm: float | None
    bytes: int
    peak_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy answers against Hugging Face's generate.

    Attributes:
        rows, tokens: answers and tokens compared.
        different_rows: answers that are not the same.
        worst: in words, the first difference of the row whose difference is least of a tie.
        ok: every difference is a tie within rounding.
    """

    rows: int
    tokens: int
    different_rows: int = 0
    worst: str = ""
    ok: bool = True

    def __str__(self) -> str:
        if not self.different_rows:
            return f"equal ({self.rows} answers, {self.tokens} tokens)"
        return f"{self.different_rows} of {self.rows} answers differ: {self.worst}"


@dataclass(slots=True)
class Verification:
    """One rank's findings.

    Attributes:
        model: what was verified, in words.
        route: "workspace" or "native".
        missing: the capability that keeps it from the workspace, if any.
        form: how tokens were decoded.
        switches: in order.
        greedy: of each generation.
        gaps: of each generation.
        draws: of each generation.
        weights: where the weights were after each generation, in words.
        workspace: what became of the workspace, in words.
        logits_change: size of the optimizer step's effect over the logits' size; None where it
            is not a number, or was not reached.
        breakdown: the engine's line of the last iteration.
        problems: one line for each mismatch.
    """

    model: str
    route: str = ""
    missing: str | None = None
    form: str = ""
    switches: list[Switch] = field(default_factory=list)
    greedy: list[Greedy] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    draws: list[Draws] = field(default_factory=list)
    weights: str = ""
    workspace: str = ""
    logits_change: float | None = None
    breakdown: str = ""
    problems: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The opposite of `as_dict`."""
        lists = {
            "switches": [Switch(**v) for v in values["switches"]],
            "greedy": [Greedy(**v) for v in values["greedy"]],
            "gaps": [Gap(**v) for v in values["gaps"]],
            "draws": [Draws.from_dict(v) for v in values["draws"]],
        }
        return cls(**{**values, **lists})
