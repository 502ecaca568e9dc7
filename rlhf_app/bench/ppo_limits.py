"""Least times of the phases of one PPO iteration, from stated formulas.

Forwards and backwards are limited by their FLOPs (GEMMs and causal attention) over the measured
peak, decoding as in `limits`, the optimizer by the bytes it moves. A backward costs twice its
forward; with LoRA the frozen weights get no gradient, so there it costs as much as the forward
in GEMMs, and twice in attention (the adapters' own products are left out: below 1 %). What a
setting computes again (gradient checkpointing) or moves (offloading) is not in the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_app.bench.limits import Machine, ModelCost, varied_decode_limit
from rlhf_app.report.bench_ppo import PhaseLimit

# AdamW reads and writes the fp32 weight or master and both moments.
_STATE_BYTES = 3 * 2 * 4


def adam_bytes(weight_bytes: int, gradient_bytes: int) -> int:
    """Bytes that AdamW moves per trained parameter in one step.

    Args:
        weight_bytes: of a parameter in training. One of half precision is written beside its
            fp32 master.
        gradient_bytes: of its gradient, as it was summed up over micro-batches.
    """
    return gradient_bytes + _STATE_BYTES + (0 if weight_bytes == 4 else weight_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOWork:
    """One iteration.

    Attributes:
        prompt: tokens of every prompt.
        answers: tokens of each answer.
        slots: answers decoded at once.
        epochs: passes of the update over the answers.
        optimizer_steps: of the actor, as of the critic.
        actor_lora, critic_lora: adapters train instead of the model.
        optimizer_bytes: moved by one optimizer step of each of the two.
        reference: the KL term needs the reference's log-probs.
    """

    prompt: int
    answers: Sequence[int]
    slots: int
    epochs: int
    optimizer_steps: int
    actor_lora: bool
    critic_lora: bool
    optimizer_bytes: int
    reference: bool = True


def ppo_limits(
    work: PPOWork,
    actor: ModelCost,
    critic: ModelCost | None,
    reward: ModelCost,
    machine: Machine,
) -> dict[str, PhaseLimit]:
    """Phase -> least work, in the order of an iteration; phases without work are left out.

    Args:
        work: the iteration.
        actor: cost of the policy, as of the reference.
        critic: cost of the critic's trunk; None without a critic.
        reward: cost of the reward model's trunk.
        machine: the device's.
    """

    def over_peak(flops: float) -> PhaseLimit:
        return PhaseLimit(flops / machine.peak, flops)

    scored = {
        "old": _forward(actor, work),
        "reference": _forward(actor, work) if work.reference else 0,
        "values": _forward(critic, work) if critic else 0,
        "reward": _forward(reward, work),
        "actor_forward_backward": work.epochs * _training(actor, work, work.actor_lora),
        "critic_forward_backward": work.epochs * _training(critic, work, work.critic_lora)
        if critic
        else 0,
    }
    step = work.optimizer_steps * work.optimizer_bytes / machine.bandwidth
    phases = {
        "prefill": over_peak(len(work.answers) * actor.forward_flops(work.prompt, 1)),
        "decode": _decode(actor, work, machine),
        **{name: over_peak(flops) for name, flops in scored.items()},
        "step": PhaseLimit(step, 0.0),
    }
    return {name: phase for name, phase in phases.items() if phase.seconds > 0}


def _forward(cost: ModelCost, work: PPOWork) -> int:
    """FLOPs of scoring every answer; a trunk has no head, so nothing is picked."""
    return sum(cost.forward_flops(work.prompt + answer, answer) for answer in work.answers)


def _training(cost: ModelCost, work: PPOWork, lora: bool) -> int:
    forward = _forward(cost, work)
    attention = sum(cost.attention_flops(work.prompt + answer) for answer in work.answers)
    gemms = forward - attention
    return (2 if lora else 3) * gemms + 3 * attention


def _decode(cost: ModelCost, work: PPOWork, machine: Machine) -> PhaseLimit:
    flops = 0
    for answer in work.answers:
        first, last = work.prompt + 1, work.prompt + answer - 1
        flops += cost.decode_flops(1) * (answer - 1)
        flops += sum(4 * layer.width * layer.seen_between(first, last) for layer in cost.layers)
    limit = varied_decode_limit(cost, machine, work.prompt, work.answers, work.slots)
    return PhaseLimit(limit.seconds, flops, limit.reading_seconds)
