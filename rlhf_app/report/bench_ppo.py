"""What `rlhf bench ppo` measured, as plain data, and the rates that follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

#: The whole rollout, where its parts are not told apart.
ROLLOUT = "rollout"
#: Phases of an iteration in their order.
PHASES = (
    "prefill", "decode", ROLLOUT, "around the rollout", "old", "reference", "values", "reward",
    "advantages", "actor_forward_backward", "critic_forward_backward", "step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PhaseLimit:
    """Least work of one phase.

    Attributes:
        seconds: at the measured bandwidth and peak.
        flops: of the model in this phase, for the utilisation.
        reading_seconds: of decode, with GEMMs bound by reading their weights alone; else 0.
    """

    seconds: float
    flops: float
    reading_seconds: float = 0.0


@dataclass(slots=True)
class Loop:
    """Iterations with one way of generating.

    Attributes:
        generation: "engine" or "native".
        seconds: of each timed iteration.
        phases: phase -> seconds, of the iteration of median length.
        peak_bytes: phase -> most memory that tensors held; on the CPU of the process so far.
        tokens: answer tokens of one iteration.
        form: how decode steps ran, in words.
        slots: most answers decoded at once.
        first_ratio: of the update; 1 where old log-probs are exact.
        error: what failed, in one line.
    """

    generation: str
    seconds: list[float] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    form: str = ""
    slots: int = 0
    first_ratio: float = 0.0
    error: str = ""

    @property
    def iteration_seconds(self) -> float:
        """Of the iteration of median length."""
        return sorted(self.seconds)[(len(self.seconds) - 1) // 2] if self.seconds else 0.0


@dataclass(slots=True)
class PPOReport:
    """All that one command measured.

    Attributes:
        models: role -> name, parameters, trained parameters.
        device: name; with bandwidth (bytes/s) and peak (FLOP/s) as measured.
        costs: role -> what the limits use of it.
        work: answers, lengths, micro-batches and the other settings.
        limits: phase -> least work.
        loops: one for each way of generating.
    """

    models: dict[str, dict[str, Any]]
    device: dict[str, Any]
    costs: dict[str, dict[str, Any]]
    work: dict[str, Any]
    limits: dict[str, PhaseLimit] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)

    @property
    def limit_seconds(self) -> float:
        """Least seconds of an iteration."""
        return sum(limit.seconds for limit in self.limits.values())

    @property
    def limit_without_old(self) -> float:
        """The same where old log-probs come from the single update itself."""
        old = self.limits.get("old")
        single = self.work["optimizer_steps"] == 1
        return self.limit_seconds - (old.seconds if old is not None and single else 0.0)

    @property
    def limit_reading(self) -> float:
        """The least of them: decode bound by what it reads alone."""
        decode = self.limits.get("decode")
        return self.limit_seconds - (decode.seconds - decode.reading_seconds if decode else 0.0)

    def rates(self, loop: Loop) -> dict[str, float]:
        """What follows from the raw seconds of a loop."""
        seconds = loop.iteration_seconds
        if not seconds:
            return {}
        flops = sum(limit.flops for limit in self.limits.values())
        return {
            "sequences_per_second": self.work["answers"] / seconds,
            "tokens_per_second": loop.tokens / seconds,
            "limit_sequences_per_second": self.work["answers"] / self.limit_seconds,
            "fraction": self.limit_seconds / seconds,
            "fraction_reading": self.limit_reading / seconds,
            "fraction_without_old": self.limit_without_old / seconds,
            "model_flops_utilisation": flops / (seconds * self.device["peak"]),
        }

    def limit_of(self, phase: str) -> PhaseLimit | None:
        """The limit of a phase; native generation does not tell prefill and decode apart."""
        if phase != ROLLOUT:
            return self.limits.get(phase)
        parts = [self.limits[name] for name in ("prefill", "decode") if name in self.limits]
        return PhaseLimit(sum(p.seconds for p in parts), sum(p.flops for p in parts))

    def phase_rates(self, loop: Loop) -> dict[str, dict[str, float]]:
        """Phase -> fraction of its limit, and utilisation of the peak."""
        rates = {}
        for name, seconds in loop.phases.items():
            limit = self.limit_of(name)
            if limit is not None and seconds > 0:
                utilisation = limit.flops / (seconds * self.device["peak"])
                rates[name] = {
                    "fraction": limit.seconds / seconds,
                    "model_flops_utilisation": utilisation,
                }
        return rates

    @property
    def speedup(self) -> float | None:
        """Of the engine's loop over the one with native generation."""
        by_name = {loop.generation: loop.iteration_seconds for loop in self.loops}
        engine, native = by_name.get("engine"), by_name.get("native")
        return native / engine if engine and native else None

    @property
    def errors(self) -> list[str]:
        """One line for each loop that failed."""
        return [f"{loop.generation}: {loop.error}" for loop in self.loops if loop.error]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: raw seconds, and the rates that follow from them."""
        values = asdict(self)
        values["limit_seconds"] = self.limit_seconds
        values["limit_seconds_reading"] = self.limit_reading
        values["limit_seconds_without_old"] = self.limit_without_old
        values["speedup_over_native"] = self.speedup
        for plain, loop in zip(values["loops"], self.loops, strict=True):
            plain["rates"] = self.rates(loop)
            plain["phase_rates"] = self.phase_rates(loop)
        return values
