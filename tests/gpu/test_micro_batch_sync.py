"""Scoring and training never wait for the device inside a micro-batch, DeepSpeed included.

torch reports waits that it makes itself: `.item()`, `.cpu()`, `nonzero`, copies from ordinary
host memory. DeepSpeed's own `stream.synchronize()` is not among them; it has some in `step`.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from data_sources.examples import PromptExample
from data_sources.records import Message, Record
from rlhf_app.config.schema import HybridEngineSettings, PPOConfig
from rlhf_app.models.scalar_head import ScalarHead, ScalarHeadModel, ScoreStats
from rlhf_app.training.deepspeed_config import engine_for
from rlhf_app.training.distributed import setup
from rlhf_app.training.phases import PhaseClock
from stages.ppo.models import PPOModels
from stages.ppo.reward import RewardScorer
from stages.ppo.rollout import collect
from stages.ppo.update import update_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EOS = 2
QUIET = {
    "old", "reference", "values", "reward", "actor_forward_backward", "critic_forward_backward",
}  # fmt: skip
PROMPTS = [
    PromptExample(str(i), [1, *range(3, 4 + i % 7)], "", Record((Message("user", ""),)))
    for i in range(16)
]
CONFIGS = {
    "llama": lambda: tf.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        eos_token_id=EOS, pad_token_id=0,
    ),
    "opt": lambda: tf.OPTConfig(
        vocab_size=97, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64, eos_token_id=EOS, dropout=0.0,
    ),
}  # fmt: skip


def build(family: str, ppo: PPOConfig, dist) -> PPOModels:
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config._attn_implementation = "sdpa"
    actor = tf.AutoModelForCausalLM.from_config(config).to(dist.device, torch.bfloat16)
    trunk = tf.AutoModel.from_config(config)
    reward = ScalarHeadModel(trunk, ScalarHead(64)).to(dist.device, torch.bfloat16)
    steps = {"micro_batch_size": 4, "total_steps": 8, "dtype": torch.bfloat16, "dist": dist}
    reference = copy.deepcopy(actor).eval().requires_grad_(False)
    critic = engine_for(copy.deepcopy(reward), ppo.critic, **steps)
    scorer = RewardScorer(reward.eval().requires_grad_(False), ScoreStats(), ppo, None)
    return PPOModels(
        actor=engine_for(actor, ppo.actor, hybrid=HybridEngineSettings(), **steps),
        critic=critic,
        reference=reference,
        scorer=scorer,
        tokenizer=None,
        chat_format=SimpleNamespace(stop_ids=(EOS,)),
        tokenizer_id="",
        suppress_ids=(),
    )


@pytest.fixture
def quiet(monkeypatch):
    """Makes torch raise at a wait inside the phases that may have none, once switched on."""
    switch = SimpleNamespace(on=False, seen=set())
    original = PhaseClock.phase

    @contextmanager
    def phase(clock, name):
        with original(clock, name):
            if not switch.on or name not in QUIET:
                yield
                return
            switch.seen.add(name)
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(PhaseClock, "phase", phase)
    return switch


@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_no_wait_inside_a_micro_batch(family, zero_stage, quiet, single_process):
    dist = setup()
    trained = {"learning_rate": 1e-3, "zero_stage": zero_stage}
    ppo = PPOConfig(
        actor=trained, critic=trained, rollout_batch_size=16, mini_batches=2, micro_batch_tokens=64,
        max_prompt_length=8, max_response_length=16,
    )  # fmt: skip
    models = build(family, ppo, dist)
    for update in (1, 2):  # the first one probes the models and builds kernels
        quiet.on = update == 2
        batch = collect(models, PROMPTS, list(range(16)), ppo, dist, seed=7, update=update)
        numbers = update_models(models, batch.experience, ppo, dist, seed=7, update=update)
        assert numbers["first_ratio"] == 1.0
        if update == 1:
            assert batch.stats.means(dist)["kl_per_answer"] == 0.0
    assert quiet.seen == QUIET
    assert all(seconds > 0 for seconds in batch.seconds.values())
