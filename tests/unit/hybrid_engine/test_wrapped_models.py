"""Models inside wrappers: peft's, whose own forward may matter, and torch.compile's."""

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.lora import base_layer, without_wrapper

GREEDY = SamplingParams(8, greedy=True)
LORA = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}


def _wrapped(model, config):
    """With adapters that say something."""
    wrapped = get_peft_model(model, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if weight.requires_grad and "quant" not in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    return wrapped.eval()


def _assert_logprobs(model, prompts, rollout):
    """Of the wrapper's own forward over each row."""
    for prompt, answer, logprobs in zip(prompts, rollout.tokens, rollout.logprobs, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits
        want = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        taken = want.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, taken, atol=1e-4, rtol=0)
    assert len({token for row in rollout.tokens for token in row}) >= 4, "degenerate text"


def test_alora_needs_the_wrapper(build):
    config = LoraConfig(**LORA, target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[6, 7])
    wrapped = _wrapped(build("llama"), config)
    ids = torch.tensor([[5, 6, 7, 9]])
    with torch.no_grad():
        gap = (wrapped(input_ids=ids).logits - wrapped.get_base_model()(input_ids=ids).logits).abs()
    assert gap.max() > 0.1, "else the refusal would be for nothing"
    with pytest.raises(ConfigError, match="aLoRA adapters"):
        Generator(wrapped)


def test_an_alora_beside_others_is_refused(build):
    wrapped = _wrapped(build("llama"), LoraConfig(**LORA, target_modules=["q_proj"]))
    wrapped.add_adapter(
        "other", LoraConfig(**LORA, target_modules=["q_proj"], alora_invocation_tokens=[6])
    )
    with pytest.raises(ConfigError, match="aLoRA adapters"):
        Generator(wrapped)


@pytest.mark.parametrize(
    "config",
    [
        peft.PolyConfig(
            r=2, n_tasks=2, n_skills=2, n_splits=1, target_modules=["q_proj"], task_type="CAUSAL_LM"
        ),
        peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_outside_the_layers_are_refused_by_name(config, build):
    with pytest.raises(ConfigError, match=rf"^{config.peft_type.value} adapters"):
        without_wrapper(get_peft_model(build("llama"), config))


def test_a_tuner_with_a_forward_of_its_own_is_refused(build, monkeypatch):
    """As X-LoRA's, and whatever comes next."""
    wrapped = _wrapped(build("llama"), LoraConfig(**LORA, target_modules=["q_proj"]))
    Generator(wrapped)
    tuner = type(wrapped.base_model)
    own = type("Tuner", (tuner,), {"forward": lambda self, *a, **k: 2 * self.model(*a, **k)})
    monkeypatch.setattr(wrapped.base_model, "__class__", own)
    with pytest.raises(ConfigError, match="LORA adapters need the forward of peft's wrapper"):
        Generator(wrapped)


def test_a_mixed_model_is_refused(build):
    config = LoraConfig(**LORA, target_modules=["q_proj"])
    with pytest.raises(ConfigError, match="PeftMixedModel"):
        without_wrapper(peft.get_peft_model(build("llama"), config, mixed=True))


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(**LORA, target_modules=["embed_tokens", "lm_head", "q_proj"]),
        LoraConfig(**LORA, target_modules=["embed_tokens"], ensure_weight_tying=True),
        LoraConfig(**LORA, target_modules=["q_proj"], trainable_token_indices=[5, 6, 7]),
        LoraConfig(**LORA, target_modules=["q_proj"], modules_to_save=["embed_tokens"]),
        peft.IA3Config(task_type="CAUSAL_LM"),
        peft.AdaLoraConfig(
            target_modules=["q_proj"], total_step=10, tinit=1, tfinal=1, task_type="CAUSAL_LM"
        ),
    ],
    ids=["embedding and head", "tied", "tokens", "saved embedding", "ia3", "adalora"],
)
def test_adapters_inside_the_layers_are_served(config, build, prompts):
    model = build("llama")
    if getattr(config, "ensure_weight_tying", False):
        model.config.tie_word_embeddings = True
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    embedding = model.get_input_embeddings()
    wrapped = _wrapped(model, config)
    # Wrappers around it may lack its size, and compute its weight anew whenever asked.
    assert base_layer(model.get_input_embeddings()) is embedding
    generator = Generator(wrapped)
    prompts = [*prompts[:4], [5, 6, 7]]
    _assert_logprobs(wrapped, prompts, generator.rollout(prompts, GREEDY))
    assert generator.capability.missing is None
    assert generator.capability.layers


def test_native_rollouts_ask_the_embedding_inside(build, prompts):
    config = LoraConfig(**LORA, target_modules=["embeddings"])
    wrapped = _wrapped(build("rwkv"), config)
    prompts = prompts[:3]
    _assert_logprobs(wrapped, prompts, Generator(wrapped).rollout(prompts, GREEDY))


@pytest.mark.parametrize("how", ["in place", "wrapper"])
def test_compiled_models_are_served(how, build, prompts):
    prompts = prompts[:3]
    want = Generator(build("llama")).rollout(prompts, GREEDY)
    model = build("llama")
    compiled = model
    if how == "wrapper":
        compiled = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    ids = torch.tensor([prompts[1]])
    with torch.no_grad():
        before = compiled(input_ids=ids).logits
        generator = Generator(compiled)
        got = generator.rollout(prompts, GREEDY)
        assert torch.equal(compiled(input_ids=ids).logits, before)
    assert generator.capability.missing is None
    assert got.tokens == want.tokens
    _assert_logprobs(build("llama"), prompts, got)


def test_wrappers_nest(build):
    model = build("llama")
    wrapped = get_peft_model(model, LoraConfig(**LORA, target_modules=["q_proj"]))
    assert without_wrapper(torch.compile(wrapped, backend="eager")) is model
