"""What `rlhf bench generate` measured, as plain data, and the rates that follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class EngineRun:
    """Rollouts of one batch with the engine.

    Attributes:
        prefill_seconds, decode_seconds, total_seconds: of the rollout of median total.
        all_seconds: totals of every repeat.
        first_seconds: of the first rollout, which sets up and captures.
        generated_tokens: answer tokens.
        decode_tokens: those that decode steps made: an answer's first token comes from prefill.
        decode_steps: forwards of the decode loop.
        slots: rows decoded at once.
        form: how decode steps ran, in words.
        peak_bytes: most memory that tensors held in a rollout; on the CPU of the process so far.
        workspace_bytes: of the peak, keys and values.
    """

    prefill_seconds: float
    decode_seconds: float
    total_seconds: float
    all_seconds: list[float]
    first_seconds: float
    generated_tokens: int
    decode_tokens: int
    decode_steps: int
    slots: int
    form: str
    peak_bytes: int
    workspace_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """Prefill included."""
        return self.generated_tokens / self.total_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Of decode steps alone."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def utilisation(self) -> float:
        """Share of slots x steps that made a token which was wanted."""
        work = self.decode_steps * self.slots
        return self.decode_tokens / work if work else 1.0


@dataclass(frozen=True, slots=True)
class Limit:
    """Least seconds of the same work; see `rlhf_app.bench.limits`.

    Attributes:
        kv_seconds: reading keys and values.
        gemm_seconds: max(reading weights, GEMM arithmetic), over the steps.
        weight_seconds: reading weights alone.
        prefill_seconds: prefill FLOPs over the peak.
        steps: decode steps that the limit assumes.
    """

    kv_seconds: float
    gemm_seconds: float
    weight_seconds: float
    prefill_seconds: float
    steps: int

    @property
    def decode_seconds(self) -> float:
        """Of decode alone."""
        return self.kv_seconds + self.gemm_seconds

    @property
    def total_seconds(self) -> float:
        """Prefill included."""
        return self.decode_seconds + self.prefill_seconds

    @property
    def floor_seconds(self) -> float:
        """Prefill included, GEMMs bound by reading weights alone."""
        return self.kv_seconds + self.weight_seconds + self.prefill_seconds


@dataclass(slots=True)
class HFRun:
    """transformers' generate on the same work.

    Attributes:
        seconds: median; 0 where it was not run.
        all_seconds: of every repeat.
        peak_bytes: most memory that tensors held.
        skipped: why it was not run.
    """

    seconds: float = 0.0
    all_seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Where the time of one decode step goes.

    Attributes:
        seconds: by kind of kernel.
        step_seconds: of an unprofiled step; what no kernel fills is waiting between them.
        steps: profiled.
        kernels: (name, kind, seconds of one step) of the longest.
    """

    seconds: dict[str, float]
    step_seconds: float
    steps: int
    kernels: list[tuple[str, str, float]]

    @property
    def between(self) -> float:
        """Seconds of a step in which no kernel runs."""
        return max(0.0, self.step_seconds - sum(self.seconds.values()))


@dataclass(slots=True)
class Row:
    """One batch size, or one number of slots with varied lengths.

    Attributes:
        requests: answers.
        slots: rows decoded at once.
        engine, limit: unset where the engine failed.
        hf: unset where it was not asked for.
        split: unset where it was not asked for or not measured.
        split_missing: why it was not measured.
        ideal_steps: decode steps of an ideal refill.
        error: what failed, in one line.
    """

    requests: int
    slots: int
    engine: EngineRun | None = None
    limit: Limit | None = None
    hf: HFRun | None = None
    split: StepSplit | None = None
    split_missing: str = ""
    ideal_steps: int = 0
    error: str = ""

    def rates(self) -> dict[str, float]:
        """What follows from the raw seconds: tokens/s, fractions of the limit, ratio to HF."""
        engine, limit = self.engine, self.limit
        if engine is None or limit is None:
            return {}
        found = {
            "tokens_per_second": engine.tokens_per_second,
            "limit_tokens_per_second": engine.generated_tokens / limit.total_seconds,
            "fraction": limit.total_seconds / engine.total_seconds,
            "floor_tokens_per_second": engine.generated_tokens / limit.floor_seconds,
            "floor_fraction": limit.floor_seconds / engine.total_seconds,
            "slot_utilisation": engine.utilisation,
        }
        # Native generation does not tell prefill and decode apart.
        if limit.decode_seconds > 0 and engine.decode_seconds > 0 and engine.form != "native":
            found["decode_tokens_per_second"] = engine.decode_tokens_per_second
            found["limit_decode_tokens_per_second"] = engine.decode_tokens / limit.decode_seconds
            found["decode_fraction"] = limit.decode_seconds / engine.decode_seconds
        if self.ideal_steps:
            found["ideal_slot_utilisation"] = engine.decode_tokens / (self.ideal_steps * self.slots)
        if self.hf is not None and self.hf.seconds > 0:
            found["hf_tokens_per_second"] = engine.generated_tokens / self.hf.seconds
            found["ratio_to_hf"] = self.hf.seconds / engine.total_seconds
        return found


@dataclass(slots=True)
class GenerateReport:
    """All that one command measured.

    Attributes:
        model: name, parameters, dtype, vocabulary, positions.
        device: name; with bandwidth (bytes/s) and peak (FLOP/s) as measured.
        cost: what the limits use of the model; see `rlhf_app.bench.limits.ModelCost`.
        work: prompt and answer tokens, sampling, lengths.
        rows: in order.
    """

    model: dict[str, Any]
    device: dict[str, Any]
    cost: dict[str, Any]
    work: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: raw seconds, and the rates that follow from them."""
        values = asdict(self)
        for plain, row in zip(values["rows"], self.rows, strict=True):
            plain["rates"] = row.rates()
            if row.split is not None:
                plain["split"]["between"] = row.split.between
        return values

    @property
    def errors(self) -> list[str]:
        """One line for each row that failed."""
        return [row.error for row in self.rows if row.error]
