from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data_sources.examples import SequenceExample
from rlhf_app.config.schema import HybridEngineSettings, RunConfig
from rlhf_app.errors import ConfigError
from stages.sft import train
from stages.sft.train import _samples

FORMAT = SimpleNamespace(stop_ids=(2,), decode=str)
HELD_OUT = [SequenceExample("u", [5, 6, 7, 2], 2, False)]


@pytest.fixture
def engine():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    return SimpleNamespace(
        module=model, eval=model.eval, train=model.train, zero_optimization_stage=lambda: 0,
        module_forward_pre_hook=None, module_forward_post_hook=None,
    )  # fmt: skip


def samples(engine, **hybrid):
    config = RunConfig(
        sft={"samples": 1, "sample_tokens": 16}, hybrid_engine=HybridEngineSettings(**hybrid)
    )
    return _samples(config, engine, HELD_OUT, FORMAT)


def test_a_held_out_prompt_is_answered(engine):
    (sample,) = samples(engine)
    assert sample["prompt"] == "[5, 6]"


def test_one_rank_samples_alone_whatever_the_size_of_shared_rollouts(engine):
    assert samples(engine, inference_tp_size=2) == samples(engine)


def test_settings_that_forbid_sampling_leave_only_a_warning(engine, caplog):
    with caplog.at_level(logging.WARNING):
        assert samples(engine, max_out_tokens=8) == []
    assert "no sample answers" in caplog.text
    assert "max_out_tokens" in caplog.text
    assert engine.module.training


@pytest.mark.parametrize("error", [ConfigError, RuntimeError, ValueError])
def test_an_error_of_sampling_leaves_only_a_warning(engine, caplog, monkeypatch, error):
    def fail(*arguments):
        raise error("some reason")

    monkeypatch.setattr(train, "sample_answers", fail)
    with caplog.at_level(logging.WARNING):
        assert samples(engine) == []
    assert "some reason" in caplog.text
