"""The fallback gives the engine's own answers: same randomness, log-probs and stop rules."""

import pytest
import torch
import transformers as tf

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Generator, SamplingParams


@pytest.mark.parametrize("max_slots", [None, 5])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(12, seed=4, stop_ids=(2, 30, 31)),
        SamplingParams(12, temperature=0.6, top_k=9, top_p=0.9, suppress_ids=(40, 41)),
        SamplingParams(12, greedy=True, stop_ids=(30,)),
    ],
    ids=["stops", "filters", "greedy"],
)
def test_native_equals_the_engine(params, max_slots, build, prompts):
    model = build("llama")
    want = Generator(model).rollout(prompts, params)
    native = Generator(model, HybridEngineSettings(enabled=False))
    got = native.rollout(prompts, params, max_slots=max_slots)
    assert got.tokens == want.tokens
    assert got.stopped == want.stopped
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    assert got.timings.generated_tokens == sum(map(len, want.tokens))


def test_the_models_own_generation_defaults_play_no_part(build, prompts):
    model = build("mpt")
    params = SamplingParams(10, greedy=True)
    want = Generator(model).rollout(prompts, params).tokens
    config = tf.GenerationConfig(
        repetition_penalty=5.0, eos_token_id=list(range(97)), suppress_tokens=[5, 6, 7]
    )
    model.generation_config = config
    assert Generator(model).rollout(prompts, params).tokens == want
    assert model.generation_config is config


def test_a_model_without_positions_sees_no_padding(prompts):
    torch.manual_seed(0)
    config = tf.BartConfig(
        vocab_size=97, d_model=32, decoder_layers=2, decoder_attention_heads=4,
        decoder_ffn_dim=48, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
        max_position_embeddings=64, init_std=0.25, is_decoder=True, is_encoder_decoder=False,
    )  # fmt: skip
    model = tf.BartForCausalLM(config).eval()
    got = Generator(model).rollout(prompts, SamplingParams(6, seed=3), max_slots=7)
    for prompt, answer, logprobs in zip(prompts, got.tokens, got.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        want = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, want, atol=1e-4, rtol=0)
