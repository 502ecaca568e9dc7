"""The update: several epochs of mini-batches over one rollout batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_app.config.schema import PPOConfig
from rlhf_app.models.whole_rows import whole_rows
from rlhf_app.training.accumulate import StepStats, optimizer_step
from rlhf_app.training.distributed import Dist
from rlhf_app.training.ema import WeightAverage
from rlhf_app.training.phases import PhaseClock
from stages.ppo.experience import Experience
from stages.ppo.logprobs import policy_logprobs
from stages.ppo.losses import Sums, value_loss
from stages.ppo.models import PPOModels
from stages.ppo.objective import actor_objective
from stages.ppo.ptx import TextMix


@whole_rows()
def update_models(
    models: PPOModels,
    experience: Sequence[Experience],
    ppo: PPOConfig,
    dist: Dist,
    *,
    seed: int,
    update: int,
    kl_coef: float | None = None,
    average: WeightAverage | None = None,
    text: TextMix | None = None,
) -> dict[str, float]:
    """Train actor and critic on one rollout batch: ppo_epochs x mini_batches optimizer steps.

    Args:
        models: the trained ones are updated in place; there may be no critic.
        experience: this rank's micro-batches, mini-batch after mini-batch: the same number for
            each of them, on every rank.
        ppo: settings.
        dist: process group.
        seed: of the run.
        update: number of the update, from 1; the critic trains alone in the warm-up.
        kl_coef: weight of a KL loss; unset: the settings'.
        average: of the actor's weights; takes each of its steps in.
        text: whose cross-entropy each of the actor's steps adds to its loss.

    Returns:
        Means over the optimizer steps, for the log; and seconds on this rank, summed over the
        steps: actor_forward_backward_seconds, critic_forward_backward_seconds, step_seconds.
        target_kl_step where target_kl ended the update: the actor step after which it did. That
        step's KL is a mean over all ranks, which therefore stop together.

    Raises:
        NonFiniteError: on every rank, before the optimizer step that would have used it.
    """

    def actor_loss(batch: Experience) -> tuple[torch.Tensor, Sums]:
        logprobs_BT, entropy_BT = policy_logprobs(
            models.actor,
            batch.answers,
            temperature=ppo.temperature,
            suppress_ids=models.suppress_ids,
            with_entropy=ppo.entropy_coef > 0,
        )
        return actor_objective(logprobs_BT, entropy_BT, batch, ppo, kl_coef=coefficient)

    def critic_loss(batch: Experience) -> tuple[torch.Tensor, Sums]:
        assert batch.old_values_BT is not None
        assert batch.returns_BT is not None
        values_BL = models.critic(batch.answers.input_ids_BL, batch.answers.position_ids_BL)
        return value_loss(
            batch.answers.at_actions(values_BL),
            batch.old_values_BT,
            batch.returns_BT,
            batch.answers.action_mask_BT,
            clip_range=ppo.value_clip_range,
        )

    coefficient = ppo.kl_coef if kl_coef is None else kl_coef
    log = _UpdateLog()
    clock = PhaseClock(dist.device)
    trains_actor = update > ppo.critic_warmup_updates
    size, rest = divmod(len(experience), ppo.mini_batches)
    # The configuration check lets only exact divisions through.
    assert size > 0
    assert rest == 0
    for epoch in range(ppo.ppo_epochs):
        # Mini-batches keep their rows (they were drawn at random with the prompts); only their
        # order changes. So the steps do not depend on how rows are spread over ranks.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + update) * 1_009 + epoch)
        for index in torch.randperm(ppo.mini_batches, generator=generator).tolist():
            mini_batch = experience[index * size : (index + 1) * size]
            (tokens,) = dist.sum([sum(e.answers.num_actions for e in mini_batch)])
            if models.critic is not None:
                critic_stats = optimizer_step(
                    models.critic, mini_batch, critic_loss, tokens, dist, clock=clock, name="critic"
                )
                log.critic(critic_stats, tokens)
            if not trains_actor:
                continue
            stats = optimizer_step(
                models.actor,
                mini_batch,
                actor_loss,
                tokens,
                dist,
                clock=clock,
                name="actor",
                added=None if text is None else text.next(),
            )
            log.actor(stats, tokens)
            if average is not None and not stats.skipped:
                average.update()
            if ppo.target_kl is not None and stats.sums["approx_kl"] / tokens > ppo.target_kl:
                return log.means() | clock.named() | {"target_kl_step": log.actor_steps}
    return log.means() | clock.named()


class _UpdateLog:
    """Means over the optimizer steps of one update."""

    def __init__(self) -> None:
        self._critic: list[dict[str, float]] = []
        self._actor: list[dict[str, float]] = []

    def critic(self, stats: StepStats, tokens: float) -> None:
        self._critic.append(
            {
                "value_loss": stats.loss,
                "critic_grad_norm": stats.grad_norm,
                "value_clip_fraction": stats.sums["value_clipped"] / tokens,
            }
        )

    def actor(self, stats: StepStats, tokens: float) -> None:
        self._actor.append(
            {
                "loss": stats.loss,
                "grad_norm": stats.grad_norm,
                "lr": stats.lr,
                "clip_fraction": stats.sums["clipped"] / tokens,
                "approx_kl": stats.sums["approx_kl"] / tokens,
                "ratio": stats.sums["ratio"] / tokens,
                **({} if stats.added_loss is None else {"ptx_loss": stats.added_loss}),
                **{k: stats.sums[k] / tokens for k in ("kl_loss",) if k in stats.sums},
            }
        )

    @property
    def actor_steps(self) -> int:
        """Steps of the actor so far."""
        return len(self._actor)

    def means(self) -> dict[str, float]:
        means = _means(self._critic) | _means(self._actor)
        means["optimizer_steps"] = self.actor_steps
        if self._actor:
            # Before the first step the policy is the one that sampled: exactly 1.
            means["first_ratio"] = self._actor[0]["ratio"]
        return means


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {}
