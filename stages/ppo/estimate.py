"""From scores and KL to advantages, by the chosen estimator, the same for any number of ranks.

Legend: N all answers of this rank, T response tokens (actions), P prompts of all ranks, K answers
of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_app.config.schema import PPOConfig
from rlhf_app.training.distributed import Dist
from rlhf_app.training.host_copy import to_device
from stages.ppo.advantages import gae, moments, scale_to_unit_std
from stages.ppo.critic_free import (
    group_relative,
    leave_one_out,
    minus_group_mean,
    reward_to_go,
    to_tokens,
)
from stages.ppo.groups import gather_groups
from stages.ppo.kl import kl_penalty
from stages.ppo.rewards import token_rewards
from stages.ppo.rollout_stats import ScoredAnswers


def estimate_advantages(
    scored: ScoredAnswers,
    log_ratio_NT: torch.Tensor,
    uids: Sequence[int],
    ppo: PPOConfig,
    dist: Dist,
    *,
    kl_coef: float,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages of every token, not yet whitened. Every rank calls.

    GAE and REINFORCE++ credit each token with the rewards that follow it. RLOO and GRPO take an
    answer as one action: its reward is the score minus the penalties of all its tokens.

    Args:
        scored: what scoring found; with critic values where the estimator reads them.
        log_ratio_NT: log pi - log pi_ref, 0 where padded.
        uids: of the answers, see `gather_groups`.
        ppo: settings.
        dist: process group.
        kl_coef: weight of the penalty in this update.

    Returns:
        (advantages_NT, returns_NT), fp32, 0 where padded. Returns are None without a critic.
    """
    mask_NT, scores_N = scored.mask_NT, scored.scores_N
    in_reward = kl_coef if ppo.kl_penalty == "reward" else 0.0
    limit = ppo.log_ratio_clamp
    kl_NT = kl_penalty(log_ratio_NT.clamp(-limit, limit), ppo.kl_estimator, clamp=ppo.kl_clamp)

    def groups_of(values_N: torch.Tensor) -> torch.Tensor:
        return gather_groups(
            values_N.tolist(),
            uids,
            dist,
            answers=ppo.rollout_batch_size,
            per_prompt=ppo.answers_per_prompt,
        )

    def own(values_PK: torch.Tensor) -> torch.Tensor:
        return to_device(values_PK.flatten()[list(uids)].float(), scores_N.device)

    if ppo.advantage_estimator in ("rloo", "group"):
        rewards_PK = groups_of(scores_N.double() - in_reward * kl_NT.double().sum(dim=1))
        compare = leave_one_out if ppo.advantage_estimator == "rloo" else group_relative
        return to_tokens(own(compare(rewards_PK)), mask_NT), None
    if ppo.advantage_estimator == "reinforce_pp" and ppo.answers_per_prompt > 1:
        scores_N = own(minus_group_mean(groups_of(scores_N)))
    rewards_NT = token_rewards(scores_N, kl_NT, mask_NT, kl_coef=in_reward)
    if ppo.whiten_rewards:
        summed = dist.sum(moments(rewards_NT, mask_NT).tolist())
        rewards_NT = scale_to_unit_std(rewards_NT, mask_NT, summed)
    if scored.values_NT is None:
        return reward_to_go(rewards_NT, mask_NT, gamma=ppo.gamma), None
    return gae(rewards_NT, scored.values_NT, mask_NT, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda)
