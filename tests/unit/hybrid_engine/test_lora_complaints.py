"""What users reported of adapters in hybrid engines, each as a test; see test_complaints.py."""

import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings, LoraSettings, PolicyLora
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.lora import adapter_off
from rlhf_app.models.lora import attach, merge_state

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]])


def adapted(model, **settings):
    lora = LoraSettings(**{"rank": 4, **settings})
    attach(model, lora, seed=0, base="the base", setting="ppo.actor.lora")
    return model


def make_adapters_count(model):
    """As after some training: B is no longer 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(0, 0.05)


@pytest.mark.parametrize("family", ["gpt2", "gpt-neox", "llama", "bloom", "falcon", "opt-350m"])
def test_complaint_dsc17_adapters_find_layers_off_opt(family, build):
    """DeepSpeed-Chat's default matched OPT's names only: nothing trained elsewhere."""
    model = adapted(build(family).train())
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) >= 2 * model.config.num_hidden_layers
    assert all("lora_" in name for name in trained)
    # A gets none before B has moved, being multiplied by 0.
    assert all(p.grad.abs().sum() > 0 for n, p in trained.items() if ".lora_B." in n)


def test_complaint_dsc17_no_match_is_an_error_that_lists_the_layers(build):
    with pytest.raises(ConfigError, match=r"ppo\.actor\.lora\.target_modules: .*c_attn.*c_proj"):
        adapted(build("gpt2"), target_modules="decoder.layers")


@pytest.mark.parametrize("rollout", ["fused", "unfused"])
def test_complaint_dsc23_opt_350m_with_adapters(rollout, build, prompts, hf_greedy):
    """Projections between two widths, post-norm: fusing compared 3072 with 4096 columns."""
    model = adapted(build("opt-350m"))
    make_adapters_count(model)
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    generator = Generator(model, HybridEngineSettings())
    generator.lora_rollout = rollout
    got = generator.rollout(prompts, SamplingParams(12, greedy=True)).tokens
    assert got == hf_greedy(model, prompts, 12)
    assert all(torch.equal(p, base[n]) for n, p in model.named_parameters())
    with adapter_off(model):
        assert hf_greedy(model, prompts, 12) != got, "the adapters changed nothing"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_complaint_peers22_the_reference_keeps_the_sft_adapter(family, build, prompts):
    """With PPO's adapters off what remains is the SFT policy, not the model before SFT."""
    before = build(family)
    sft = adapted(build(family))
    make_adapters_count(sft)
    start = build(family)
    start.load_state_dict(merge_state(sft, sft.state_dict()))
    policy = adapted(start, **PolicyLora(rank=2).model_dump(include={"rank"}))
    with torch.no_grad():
        trained, original = sft(IDS).logits, before(IDS).logits
        with adapter_off(policy):
            reference = policy(IDS).logits
        assert torch.equal(policy(IDS).logits, reference)  # KL is exactly 0 at step 0
    assert torch.allclose(reference, trained, atol=1e-4)
    assert not torch.allclose(reference, original, atol=1e-1)
    sampled = SamplingParams(8, seed=3)
    with adapter_off(policy):
        want = Generator(policy).rollout(prompts, sampled).tokens
    assert Generator(policy).rollout(prompts, sampled).tokens == want
