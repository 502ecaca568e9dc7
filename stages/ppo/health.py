"""Signs that a run goes wrong, from the numbers of its updates and evaluations.

PPO can fail with every loss in order: the policy collapses to one answer, drifts far from the
reference, learns to be long, or pleases the reward model and nobody else (Gao et al. 2023,
arXiv:2210.10760). Each sign is told once a run, with what to try.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Thresholds:
    """What counts as a sign. Healthy runs of this project stay clear of all of them.

    Attributes:
        patience: updates in a row that must show a sign.
        entropy: nats per token; below it the policy is nearly deterministic ...
        entropy_share: ... or below this share of the first update's.
        distinct_share: distinct-3 of a rollout below this share of the first update's.
        unique_answers: share of a rollout's answers that differ, below this ...
        unique_share: ... and below this share of the first update's.
        kl_per_token: nats; above it on average, ...
        kl_per_answer: ... or in all, the policy has left the reference.
        length_growth: answers this many times as long as in the first update ...
        length_eos_share: ... of which less than this share of the first update's end by
            themselves.
        eos_rate: share of answers that end by themselves, below this.
        reward_std: of the scores of a rollout; at 0 there is nothing to learn from.
        length_correlation: of reward and length over the answers of a rollout.
        explained_variance: of the returns; below it the critic is worse than a constant ...
        critic_patience: ... and this many updates in a row must show it: a few at the start are
            common, and harmless where only the critic trains.
        hacking_errors: gold fell, and reward rose, by this many standard errors of the
            difference of two evaluations.
    """

    patience: int = 3
    entropy: float = 0.02
    entropy_share: float = 0.2
    distinct_share: float = 0.4
    unique_answers: float = 0.5
    unique_share: float = 0.5
    kl_per_token: float = 1.0
    kl_per_answer: float = 100.0
    length_growth: float = 1.5
    length_eos_share: float = 0.7
    eos_rate: float = 0.02
    reward_std: float = 1e-6
    length_correlation: float = 0.7
    explained_variance: float = 0.0
    critic_patience: int = 5
    hacking_errors: float = 2.0

    def patience_for(self, kind: str) -> int:
        """Updates in a row after which a kind of sign is told."""
        return self.critic_patience if kind == "critic" else self.patience


THRESHOLDS = Thresholds()


def signs(start: Numbers, now: Numbers, limits: Thresholds = THRESHOLDS) -> dict[str, str]:
    """What one update shows.

    Args:
        start: numbers of the first update.
        now: those of this one. Names that are missing, and NaN, show nothing.
        limits: thresholds.

    Returns:
        kind -> what was seen and what to try, one line.
    """
    first, value = _reader(start), _reader(now)
    found: dict[str, str] = {}
    entropy, before = value("entropy"), first("entropy")
    if entropy < limits.entropy or entropy < limits.entropy_share * before:
        found["entropy"] = (
            f"the policy's entropy is {entropy:.3f} nats a token ({before:.3f} at first): it "
            "nearly always says the same; raise ppo.kl_coef or ppo.entropy_coef, or lower the "
            "learning rate"
        )
    distinct, before = value("distinct_3"), first("distinct_3")
    if distinct < limits.distinct_share * before:
        found["repetition"] = (
            f"answers repeat themselves or each other: {distinct:.2f} of their trigrams are "
            f"distinct ({before:.2f} at first); raise ppo.kl_coef"
        )
    unique, before = value("unique_answers"), first("unique_answers")
    if unique < min(limits.unique_answers, limits.unique_share * before):
        found["same_answers"] = (
            f"only {unique:.0%} of the answers differ from all others ({before:.0%} at first): "
            "the policy collapses; raise ppo.kl_coef or ppo.entropy_coef"
        )
    kl, length = value("kl_per_answer"), value("answer_length")
    if kl > limits.kl_per_answer or kl > limits.kl_per_token * length:
        found["kl"] = (
            f"the policy is {kl:.0f} nats an answer away from the reference: its reward means "
            "little there; raise ppo.kl_coef, lower the learning rate, or set ppo.stop_kl"
        )
    ends, before = value("eos_rate"), first("eos_rate")
    if (
        length > limits.length_growth * first("answer_length")
        and ends < limits.length_eos_share * before
    ):
        # A critic that expects too much makes every ending look like a loss.
        advice = (
            "the critic misleads, see ppo.critic_warmup_updates"
            if value("explained_variance") < limits.explained_variance
            else "raise ppo.kl_coef, or set ppo.length_penalty"
        )
        found["length"] = (
            f"answers run away: {length:.0f} tokens ({first('answer_length'):.0f} at first), and "
            f"{ends:.0%} of them end by themselves ({before:.0%} at first); {advice}"
        )
    elif ends < limits.eos_rate:
        found["never_ends"] = (
            f"{ends:.0%} of the answers end by themselves: raise ppo.max_response_length, train "
            "SFT (longer) on answers that have an end, or let all have the same length with "
            "ppo.stop_at_eos=false"
        )
    if value("reward_std") < limits.reward_std:
        found["reward_std"] = (
            f"every answer of the rollout has the same reward ({value('reward'):.3f}): there is "
            "nothing to learn from; look at what gives the reward, and at its clip"
        )
    explained = value("explained_variance")
    if explained < limits.explained_variance:
        found["critic"] = (
            f"the critic is worse than a constant (explained variance {explained:.2f}) while the "
            "actor learns from it; train it alone first with ppo.critic_warmup_updates, and raise "
            "ppo.critic.learning_rate"
        )
    correlation = value("reward_length_correlation")
    if correlation > limits.length_correlation:
        found["reward_is_length"] = (
            f"reward and length of the answers correlate at {correlation:.2f}: the reward may "
            "pay for length alone; look at samples, or set ppo.length_penalty"
        )
    return found


def is_hacking(
    best: Numbers, now: Numbers, answers: int, limits: Thresholds = THRESHOLDS
) -> str | None:
    """Whether reward rose while gold fell, beyond the noise of both evaluations.

    Args:
        best: `reward`, `reward_std`, `gold` and `gold_std` of the evaluation with the best gold.
        now: the same of this one.
        answers: of an evaluation.
        limits: thresholds.

    Returns:
        What was seen and what to try, or None.
    """
    before, after = _reader(best), _reader(now)

    def rise(name: str) -> float:
        """Of the mean, in standard errors of the difference of two means."""
        variance = before(f"{name}_std") ** 2 + after(f"{name}_std") ** 2
        change = after(name) - before(name)
        if change == 0:
            return 0.0
        return (
            change / math.sqrt(variance / answers)
            if variance > 0
            else math.copysign(math.inf, change)
        )

    if not (rise("gold") < -limits.hacking_errors and rise("reward") > limits.hacking_errors):
        return None
    return (
        f"reward rose from {before('reward'):.3f} to {after('reward'):.3f} while gold fell from "
        f"{before('gold'):.3f} to {after('gold'):.3f}: the policy exploits the reward; "
        "raise ppo.kl_coef, set ppo.stop_kl, or keep the best with ppo.keep_best gold"
    )


class Health:
    """Watches a run and warns of each kind of sign once, in the log.

    Args:
        limits: thresholds.
        never_ends: answers cannot end by themselves, so it is no sign that they do not.
        critic_warmup: first updates in which the actor learns nothing from the critic.
        enabled: whether this rank writes to the log.
    """

    def __init__(
        self,
        limits: Thresholds = THRESHOLDS,
        *,
        never_ends: bool = False,
        critic_warmup: int = 0,
        enabled: bool = True,
    ) -> None:
        self._limits = limits
        self._ignored = {"never_ends", "length"} if never_ends else set()
        self._critic_warmup = critic_warmup
        self._enabled = enabled
        self._start: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._streaks: dict[str, int] = {}
        self._warnings: list[dict[str, Any]] = []

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """`update`, `kind` and `text` of each, in the order in which they came up."""
        return list(self._warnings)

    def update(self, update: int, numbers: Numbers) -> None:
        """Look at the numbers of one update."""
        if not self._start:
            self._start = dict(numbers)
        found = signs(self._start, numbers, self._limits)
        if update <= self._critic_warmup:
            found.pop("critic", None)
        self._streaks = {kind: self._streaks.get(kind, 0) + 1 for kind in found}
        for kind, text in found.items():
            enough = self._streaks[kind] >= self._limits.patience_for(kind)
            if enough and kind not in self._ignored:
                self._warn(update, kind, text)

    def evaluation(self, update: int, numbers: Numbers, golds: Sequence[float | None]) -> None:
        """Look at one evaluation.

        Args:
            update: updates done.
            numbers: `reward`, `reward_std`, and `gold` where there is a scorer.
            golds: gold of each answer; None without a scorer.
        """
        known = [gold for gold in golds if gold is not None]
        if "gold" not in numbers or not known:
            return
        mean = sum(known) / len(known)
        spread = math.sqrt(sum((gold - mean) ** 2 for gold in known) / len(known))
        now = {name: numbers[name] for name in ("reward", "reward_std", "gold")}
        now["gold_std"] = spread
        if not self._best or now["gold"] > self._best["gold"]:
            self._best = now
            return
        text = is_hacking(self._best, now, len(known), self._limits)
        if text is not None:
            self._warn(update, "hacking", text)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, for a checkpoint."""
        return {
            "start": self._start,
            "best": self._best,
            "streaks": self._streaks,
            "warnings": self._warnings,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._start, self._best = dict(state["start"]), dict(state["best"])
        self._streaks, self._warnings = dict(state["streaks"]), list(state["warnings"])

    def _warn(self, update: int, kind: str, text: str) -> None:
        if any(warning["kind"] == kind for warning in self._warnings):
            return
        self._warnings.append({"update": update, "kind": kind, "text": text})
        if self._enabled:
            log.warning("update %d: %s", update, text)


def stop_reason(numbers: Numbers, stop_kl: float | None) -> str | None:
    """Why training ends after this update, or None.

    Args:
        numbers: of the update, the same on every rank.
        stop_kl: `ppo.stop_kl`.
    """
    kl = numbers["kl_per_answer"]
    if stop_kl is None or kl <= stop_kl:
        return None
    return f"kl_per_answer {kl:.3f} exceeds ppo.stop_kl {stop_kl:g}"


def _reader(numbers: Numbers) -> Any:
    """A number by name, or NaN, with which no comparison holds."""

    def read(name: str) -> float:
        return numbers.get(name, math.nan)

    return read
