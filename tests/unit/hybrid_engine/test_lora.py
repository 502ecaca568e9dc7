"""Adapters in rollouts: same policy as peft's forward, base untouched, reference by switching."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_app.config.schema import LoraSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams, initialize
from rlhf_app.hybrid_engine.lora import adapter_off, rollout_forward, rollout_state
from rlhf_app.models.lora import attach
from rlhf_app.training.distributed import close, setup

# Falcon's linear layers are a class of its own.
FAMILIES = ["opt", "opt-350m", "gpt2", "llama", "gemma2", "phi3", "mixtral", "falcon"]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25]])
GREEDY = SamplingParams(12, greedy=True, suppress_ids=(2,))


def train_a_bit(model, scale=0.05):
    """Stands for training: fresh adapters have a B of zeros."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, scale)
    return model


@pytest.fixture
def adapted(build):
    def make(family="llama", dtype=torch.float32, **settings):
        model = build(family).to(dtype)
        attach(model, LoraSettings(rank=4, **settings), seed=0, base=family, setting="lora")
        return train_a_bit(model)

    return make


def bits(model) -> str:
    """Hash of the base's weights."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_without_adapters_the_model_is_its_base(family, build, adapted):
    model, base = adapted(family), build(family)
    before = [p.requires_grad for p in model.parameters()]
    policy = logits(model)
    with adapter_off(model):
        reference = logits(model)
        with adapter_off(model):
            assert torch.equal(logits(model), reference)
        assert torch.equal(logits(model), reference)
    assert torch.equal(reference, logits(base))
    assert (policy - reference).abs().max() > 0.1
    assert torch.equal(logits(model), policy)
    assert [p.requires_grad for p in model.parameters()] == before


def test_the_adapters_come_back_after_an_exception(adapted):
    model = adapted()
    policy = logits(model)
    with pytest.raises(RuntimeError, match="stop"), adapter_off(model):
        raise RuntimeError("stop")
    assert torch.equal(logits(model), policy)


def test_the_policy_is_never_taken_for_the_reference(build, adapted):
    with pytest.raises(ConfigError, match="has no adapters"), adapter_off(build("llama")):
        pass
    model = get_peft_model(build("llama"), LoraConfig(r=4, target_modules="all-linear"))
    train_a_bit(model).merge_adapter()
    with pytest.raises(ConfigError, match="merged"), adapter_off(model):
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_both_rollouts_are_the_policy_that_trains(
    family, adapted, prompts, hf_greedy, assert_same_greedy
):
    """Against transformers' own generate over peft's own forward.

    OPT-350M among them: DeepSpeed's hybrid engine fails to fuse its adapters (3072 against
    4096), and GPT-2 keeps its weights transposed.
    """
    model = adapted(family)
    before, hashed = logits(model), bits(model)
    want = hf_greedy(model, prompts, GREEDY.max_new_tokens)
    generator = Generator(model)
    params = SamplingParams(GREEDY.max_new_tokens, greedy=True)
    unfused = generator.rollout(prompts, params)
    generator.lora_rollout = "fused"
    fused = generator.rollout(prompts, params)
    assert generator.capability.missing is None
    for rollout in (unfused, fused):
        assert_same_greedy(model, prompts, rollout.tokens, want)
    pairs = zip(unfused.logprobs, fused.logprobs, strict=True)
    assert max((a - b).abs().max() for a, b in pairs) < 1e-4
    assert torch.equal(logits(model), before)
    assert bits(model) == hashed
    with torch.no_grad(), rollout_forward(model, "fused"):
        kinds = {m.forward.kind for m in model.modules() if "forward" in m.__dict__}
    assert kinds == {"unfused" if family == "falcon" else "fused"}


class Products(TorchDispatchMode):
    """Counts matrix products and additions to them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_unfused_adds_two_products_to_each_layer_and_nothing_else(family, adapted):
    model = adapted(family)
    name = "mlp.down_proj" if family == "llama" else "mlp.c_fc"
    block = model.model.layers[0] if family == "llama" else model.transformer.h[0]
    layer = block.get_submodule(name)
    x = torch.randn(3, 5, layer.in_features)
    with torch.no_grad():
        want = layer(x)
        with Products() as base:
            layer.base_layer(x)
        with rollout_forward(model), Products() as fast:
            got = layer(x)
        kernels = [call for call in fast.calls if call not in {"t", "view", "_unsafe_view"}]
        alone = [call for call in base.calls if call not in {"t", "view", "_unsafe_view"}]
    assert sorted(kernels) == sorted([*alone, "mm", "addmm_"])
    assert torch.allclose(got, want, atol=1e-5)
    assert "forward" not in layer.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_has_the_same_bits_after_50_fused_rollouts(dtype, adapted, prompts):
    """Adding and subtracting the product changes 4 of 10 half-precision weights."""
    model = adapted(dtype=dtype)
    before, address = bits(model), [p.data_ptr() for p in model.parameters()]
    generator = Generator(model)
    generator.lora_rollout = "fused"
    for cycle in range(50):
        generator.rollout(prompts[:2], SamplingParams(2, seed=cycle))
        train_a_bit(model, scale=0.01 * (cycle + 1))
    assert bits(model) == before
    assert [p.data_ptr() for p in model.parameters()] == address


def test_the_base_comes_back_after_an_exception(adapted, monkeypatch):
    model = adapted()
    before = bits(model)
    seen = []

    def fail_inside() -> None:
        with torch.no_grad(), rollout_forward(model, "fused"):
            seen.append(bits(model))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    assert bits(model) == before != seen[0]
    # Also when fusing itself fails half-way.
    calls = iter(range(100))

    def no_memory(*arguments, **keywords):
        if next(calls) == 3:
            raise RuntimeError("no memory")
        return torch.empty(*arguments, **keywords)

    monkeypatch.setattr(
        torch, "empty_like", lambda like, **keywords: no_memory(like.shape, dtype=like.dtype)
    )
    with pytest.raises(RuntimeError, match="no memory"), rollout_forward(model, "fused"):
        pytest.fail("must not start")
    assert next(calls) == 4
    assert bits(model) == before
    assert not [m for m in model.modules() if "forward" in m.__dict__]


def test_fused_weights_are_the_sum_rounded_once(adapted):
    """In bf16; peft's own merge rounds the product first, and then the sum."""
    model = adapted(dtype=torch.bfloat16)
    layer = model.model.layers[0].self_attn.q_proj
    w, a, b = (
        layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight,
    )  # fmt: skip
    want = (w.double() + 8.0 * (b.double() @ a.double())).to(torch.bfloat16)
    with torch.no_grad(), rollout_forward(model, "fused"):
        assert torch.equal(w, want)


def test_in_bf16_unfused_stays_closer_to_the_training_forward():
    """Mean gap of teacher-forced log-probs; fusing a small adapter leaves most weights as is."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        initializer_range=0.08,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    attach(model, LoraSettings(rank=8), seed=0, base="x", setting="lora")
    train_a_bit(model, scale=3e-4)
    ids = torch.randint(3, 97, (32, 48))

    def logprobs() -> torch.Tensor:
        table = model(ids).logits[:, :-1].float().log_softmax(-1)
        return table.gather(-1, ids[:, 1:, None])

    weight = model.model.layers[0].mlp.up_proj.base_layer.weight
    with torch.no_grad():
        trained, before = logprobs(), weight.clone()
        with rollout_forward(model, "unfused"):
            unfused = (logprobs() - trained).abs().mean()
        with rollout_forward(model, "fused"):
            fused = (logprobs() - trained).abs().mean()
            unchanged = (weight == before).float().mean()
    assert 0 < unfused < 0.9 * fused
    assert fused < 0.05
    assert 0.4 < unchanged < 0.9


@pytest.mark.parametrize("mode", ["unfused", "fused"])
@pytest.mark.parametrize("kind", ["dora", "two adapters", "rslora"])
def test_unusual_adapters_keep_their_meaning(
    kind, mode, build, prompts, hf_greedy, assert_same_greedy
):
    config = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}
    model = get_peft_model(
        build("llama"), LoraConfig(**config, use_dora=kind == "dora", use_rslora=kind == "rslora")
    )
    if kind == "two adapters":
        model.add_adapter("second", LoraConfig(**config))
        model.base_model.set_adapter(["default", "second"])
    train_a_bit(model).eval()
    hashed, peft_model = bits(model), model.get_base_model()
    want = hf_greedy(peft_model, prompts, GREEDY.max_new_tokens)
    generator = Generator(model)  # peft's wrapper is looked through
    generator.lora_rollout = mode
    params = SamplingParams(GREEDY.max_new_tokens, greedy=True)
    assert_same_greedy(peft_model, prompts, generator.rollout(prompts, params).tokens, want)
    assert bits(model) == hashed
    with torch.no_grad(), rollout_forward(peft_model, mode):
        fast = [m for m in peft_model.modules() if "forward" in m.__dict__]
    with adapter_off(model):
        reference = generator.rollout(prompts, params).tokens
    assert reference == Generator(build("llama")).rollout(prompts, params).tokens != want
    assert len(fast) == (21 if kind == "rslora" else 0)


def test_fp32_adapters_over_a_bf16_base_keep_pefts_casts(build, prompts):
    model = get_peft_model(
        build("llama").to(torch.bfloat16), LoraConfig(r=4, target_modules="all-linear")
    )
    train_a_bit(model).eval()
    assert model.get_base_model().model.layers[0].mlp.up_proj.lora_A["default"].weight.dtype == (
        torch.float32
    )
    assert len(Generator(model).rollout(prompts, SamplingParams(4)).tokens) == len(prompts)


def test_fusing_a_tied_head_leaves_the_embedding_alone(build):
    config = copy.deepcopy(build("llama").config)
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    tied = tf.LlamaForCausalLM(config).eval()
    model = get_peft_model(tied, LoraConfig(r=4, target_modules=["lm_head", "q_proj"]))
    train_a_bit(model)
    embedding = tied.model.embed_tokens.weight.clone()
    want = logits(tied)
    with torch.no_grad(), rollout_forward(tied, "fused"):
        assert torch.equal(tied.model.embed_tokens.weight, embedding)
        assert torch.allclose(logits(tied), want, atol=1e-4)


def test_a_users_own_peft_model_trains_and_generates(build):
    """peft's wrapper goes into `initialize` as it is; the reference is it with adapters off."""
    setup()
    try:
        model = get_peft_model(build("opt-350m"), LoraConfig(r=4, target_modules="all-linear"))
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = initialize(
            model=model,
            optimizer=torch.optim.AdamW(trained, lr=0.02),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True,
            },
        )[0]
        base = bits(model)
        arguments = {"max_new_tokens": 8, "do_sample": False, "suppress_tokens": [2]}
        answers = []
        for _ in range(3):
            engine.eval()
            answers.append(engine.generate(IDS, **arguments).tolist())
            # The wrapper's own generate, through transformers.
            assert answers[-1] == model.generate(input_ids=IDS, **arguments).tolist()
            with adapter_off(engine):
                assert engine.generate(IDS, **arguments).tolist() == answers[0]
            engine.train()
            engine.backward(engine(input_ids=IDS, labels=IDS).loss)
            engine.step()
        assert answers[0] != answers[1] != answers[2]
        assert engine.generator.capability.missing is None
        assert bits(model) == base
    finally:
        close()


def test_prompt_tuning_is_refused(build):
    model = get_peft_model(
        build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    )
    with pytest.raises(ConfigError, match="PROMPT_TUNING adapters put tokens before the prompt"):
        Generator(model)


def test_state_tells_apart_what_a_graph_must_not_mix_up(adapted, build):
    model = adapted()
    states = [rollout_state(build("llama")), rollout_state(model)]
    with torch.no_grad():
        for mode in ("unfused", "fused"):
            with rollout_forward(model, mode):
                states.append(rollout_state(model))
                hash(states[-1])
            with rollout_forward(model, mode):
                assert rollout_state(model) == states[-1]
        with adapter_off(model), rollout_forward(model):
            states.append(rollout_state(model))
        model.model.layers[1].mlp.up_proj.scaling["default"] = 3.0
        with rollout_forward(model):
            states.append(rollout_state(model))
    assert len(set(states)) == len(states) == 6


def test_weights_that_are_not_whole_cannot_be_fused(adapted):
    model = adapted()
    weight = model.model.layers[0].self_attn.q_proj.base_layer.weight
    weight.data = torch.empty(0)  # as ZeRO-3 leaves it
    with (
        pytest.raises(ConfigError, match="pin_parameters to true"),
        rollout_forward(model, "fused"),
    ):
        pytest.fail("must not start")
