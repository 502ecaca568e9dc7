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
    """

    mean: float
    max: float
    tokens: int
    mean_bound: float
    max_bound: float
    floor_mean: float | None = None
    floor_max: float | None = None

    @property
    def excess(self) -> float:
        """Above 1: more than rounding explains."""
        return max(self.mean / self.mean_bound, self.max / self.max_bound)

    @property
    def ok(self) -> bool:
        """Whether rounding explains it."""
        return self.excess <= 1.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values; `Gap(**values)` is equal again."""
        return asdict(self)

    def __str__(self) -> str:
        text = (
            f"log-prob gap mean {self.mean:.2g}, max {self.max:.2g} nats over {self.tokens} "
            f"tokens (bounds {self.mean_bound:.2g}, {self.max_bound:.2g}"
        )
        if self.floor_mean is not None and self.floor_max is not None:
            text += f"; noise floor {self.floor_mean:.2g}, {self.floor_max:.2g}"
        return text + ")"


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
        weights: where the weights were after each generation, in words.
        workspace: what became of the workspace, in words.
        logits_change: size of the optimizer step's effect over the logits' size.
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
    weights: str = ""
    workspace: str = ""
    logits_change: float = 0.0
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
        }
        return cls(**{**values, **lists})
