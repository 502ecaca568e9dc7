"""Complaints of DeepSpeed-Chat's users that one family or another brought up, by their number."""

import logging

import pytest
import torch
import transformers as tf

from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.attention import Decode
from rlhf_app.models.scalar_head import ScalarHead, ScalarHeadModel, hidden_width

# The families that DeepSpeed's own hybrid engine injects kernels into, or says it does.
INJECTED = ["opt", "gpt2", "gptj", "gpt-neo", "gpt-neox", "codegen", "llama", "bloom"]
GREEDY = SamplingParams(10, greedy=True)


@pytest.mark.parametrize("family", INJECTED)
def test_complaint_dsc01_a_broken_decode_kernel_is_never_used(
    family, build, prompts, hf_greedy, assert_same_greedy, monkeypatch, caplog
):
    """One token repeated to the end: kernels that nobody had compared with the model."""
    model = build(family)
    attend = Decode.attend

    def stale(self, call):
        attend(self, call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], 1)

    monkeypatch.setattr(Decode, "attend", stale)
    with caplog.at_level(logging.WARNING, logger="rlhf_app"):
        got = Generator(model).rollout(prompts, GREEDY).tokens
    assert [r.getMessage() for r in caplog.records if "decoded logits" in r.getMessage()]
    assert_same_greedy(model, prompts, got, hf_greedy(model, prompts, 10))


@pytest.mark.parametrize("family", [*INJECTED, "opt-350m", "falcon", "falcon-alibi", "gemma2"])
def test_complaint_dsc07_left_padding_changes_no_row(family, build, prompts, hf_greedy):
    """Lost or misshaped attention masks let rows see their padding."""
    model = build(family)
    model.generation_config = tf.GenerationConfig()
    generator = Generator(model)
    rows = prompts[:6]
    longest = max(map(len, rows)) + 3  # no row is without padding
    ids = torch.tensor([[40] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    got = generator.generate(ids, mask, max_new_tokens=8)
    assert generator.capability.missing is None
    assert got[:, :longest].tolist() == ids.tolist()
    alone = [hf_greedy(model, [row], 8)[0] for row in rows]
    assert got[:, longest:].tolist() == alone
    unmasked = generator.generate(ids, torch.ones_like(mask), max_new_tokens=8)
    assert unmasked[:, longest:].tolist() != alone, "the mask does not matter: nothing is tested"


@pytest.mark.parametrize("family", ["bloom", "gpt2", "gpt-neo", "falcon-alibi", "opt-350m", "mpt"])
def test_complaint_dsc15_a_score_does_not_depend_on_padding(family, build, prompts):
    """Reward models off OPT crashed, or read the score at a padding token."""
    model = build(family)
    backbone = model.base_model
    backbone = backbone.decoder if hasattr(backbone, "decoder") else backbone
    torch.manual_seed(0)
    scored = ScalarHeadModel(backbone, ScalarHead(hidden_width(model.config)))
    longest = max(map(len, prompts))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in prompts])
    positions = torch.arange(longest).expand(ids.shape)
    last = torch.tensor([len(row) - 1 for row in prompts])
    with torch.no_grad():
        got = scored(ids, positions)[torch.arange(len(prompts)), last]
        alone = torch.stack([scored(torch.tensor([row]))[0, -1] for row in prompts])
    torch.testing.assert_close(got, alone, atol=1e-4, rtol=0)
    assert got.std() > 0.01


@pytest.mark.parametrize("family", ["bloom", "falcon-gqa", "gpt-neo", "opt-350m"])
def test_complaint_dsc27_a_model_saved_between_rollouts_answers_alike(
    family, build, prompts, tmp_path
):
    model = build(family)
    generator = Generator(model)
    before = generator.rollout(prompts, GREEDY).tokens
    model.save_pretrained(tmp_path)
    assert generator.rollout(prompts, GREEDY).tokens == before
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation in ("sdpa", "eager")
    again = Generator(loaded)
    assert again.rollout(prompts, GREEDY).tokens == before
    assert again.capability.adapted == generator.capability.adapted
