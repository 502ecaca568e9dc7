"""One rollout and update over any number of ranks: `ppo_ranks.py OUT ZERO_STAGE WEIGHTS BUDGET`.

Half of the eight prompts end with a token after which the actor can only stop. With two ranks
they are rank 0's, whose answers are then single EOS tokens. WEIGHTS is pinned, unpinned, native
(unpinned, and transformers' own generate) or sliced (tensor parallel). BUDGET is the most tokens
of a micro-batch, or 0 for two rows. Rank 0 writes OUT.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from stage_runs import split_small_weights
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.commands.worker import leave
from rlhf_app.config.schema import HybridEngineSettings, PPOConfig
from rlhf_app.models.scalar_head import ScalarHead, ScalarHeadModel, ScoreStats
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import Dist, setup
from stages.ppo.evaluate import evaluate_policy
from stages.ppo.models import PPOModels
from stages.ppo.prompts import rank_uids
from stages.ppo.reward import RewardScorer
from stages.ppo.rollout import collect
from stages.ppo.update import update_models

EOS, STOPPER = 2, 22
STATS = ScoreStats(mean=0.3, std=1.7)


@dataclass
class IdFormat:
    """Stands in for a chat format where no text is needed."""

    stop_ids: tuple[int, ...] = (EOS,)

    def decode(self, ids: list[int]) -> str:
        """The ids, as text."""
        return " ".join(map(str, ids))


def prompt(index: int) -> PromptExample:
    ids = [1, *range(3, 4 + index % 5), STOPPER if index < 4 else 10 + index]
    return PromptExample(str(index), ids, "", Record((Message("user", ""),)))


def build(ppo: PPOConfig, hybrid: HybridEngineSettings, dist: Dist) -> PPOModels:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=1, eos_token_id=EOS, pad_token_id=0,
    )  # fmt: skip
    actor = LlamaForCausalLM(config)
    with torch.no_grad():
        direction = torch.nn.functional.normalize(torch.randn(32), dim=0)
        actor.model.embed_tokens.weight[STOPPER] = 60 * direction
        actor.lm_head.weight[EOS] += 2.5 * direction
    critic = ScalarHeadModel(LlamaModel(config), ScalarHead(32))
    reward = copy.deepcopy(critic).eval().requires_grad_(False)
    steps = {"micro_batch_size": ppo.micro_batch_size, "total_steps": 8, "dtype": torch.float32}
    return PPOModels(
        reference=copy.deepcopy(actor).eval().requires_grad_(False),
        actor=engine_for(actor, ppo.actor, hybrid=hybrid, dist=dist, **steps),
        critic=engine_for(critic, ppo.critic, dist=dist, **steps),
        scorer=RewardScorer(reward, STATS, ppo, IdFormat()),
        tokenizer=None,
        chat_format=IdFormat(),
        tokenizer_id="",
        suppress_ids=(),
    )


def main(out: Path, zero_stage: int, weights: str, budget: int) -> None:
    split_small_weights()
    dist = setup()
    trained = {"zero_stage": zero_stage, "learning_rate": 3e-3, "lr_schedule": "constant"}
    ppo = PPOConfig(
        actor=trained, critic=trained, rollout_batch_size=8, micro_batch_size=2, ppo_epochs=2,
        max_prompt_length=8, max_response_length=10, micro_batch_tokens=budget or None,
    )  # fmt: skip
    hybrid = HybridEngineSettings(
        pin_parameters=weights == "pinned", enabled=weights != "native", tp_gather_partition_size=1,
        inference_tp_size=2 if weights == "sliced" else 1,
    )  # fmt: skip
    models = build(ppo, hybrid, dist)
    uids = rank_uids(ppo, dist)
    numbers, answers = [], {}
    for update in (1, 2):
        batch = collect(
            models, [prompt(uid) for uid in uids], uids, ppo, dist, seed=7, update=update
        )
        mine = {
            f"{update}/{uids[row]}": actions[:count]
            for answers in (e.answers for e in batch.experience)
            for row, actions, count in zip(
                answers.rows_B.tolist(), answers.actions_BT.tolist(),
                answers.action_mask_BT.sum(1).tolist(), strict=True,
            )
        }  # fmt: skip
        for part in dist.gather_objects(mine):
            answers |= part
        numbers.append(batch.stats.means(dist) | update_models(
            models, batch.experience, ppo, dist, seed=7, update=update
        ))  # fmt: skip
    # The answers of one rank are single EOS tokens, whose KL is far below the other's.
    batch = collect(models, [prompt(uid) for uid in uids], uids, ppo, dist, seed=7, update=3)
    stopping = ppo.model_copy(update={"ppo_epochs": 4, "target_kl": 1e-7})
    stopped = update_models(models, batch.experience, stopping, dist, seed=7, update=3)
    # Three prompts, then one: the last rank has one fewer, then none at all.
    evaluations = [
        evaluate_policy(
            models.actor, models.actor, models, [prompt(i) for i in range(3, 3 + count)], ppo,
            dist, gold=None, seed=7,
        )
        for count in (3, 1)
    ]  # fmt: skip
    steps = dist.gather_objects(
        [stopped.get("target_kl_step"), models.actor.global_steps, models.critic.global_steps]
    )
    if dist.is_main:
        report = {
            "steps": steps,
            "numbers": numbers,
            "answers": answers,
            "evaluations": [e.numbers() for e in evaluations],
            "texts": [e.answers for e in evaluations],
        }
        out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    leave(0)
