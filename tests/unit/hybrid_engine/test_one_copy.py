"""One copy of the weights: addresses stay where they are, and memory does not grow."""

import gc
import resource

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_app.hybrid_engine import SamplingParams, initialize
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.training.distributed import close, setup

pytestmark = pytest.mark.slow

MIB = 1 << 20
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture
def group():
    yield setup()
    close()


def llama(width=32, vocab=97):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def engine_of(model, stage, lr=1e-3, **hybrid):
    trained = [p for p in model.parameters() if p.requires_grad]
    half = model.dtype == torch.bfloat16
    return initialize(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=lr),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": half},
            "hybrid_engine": hybrid,
        },
    )[0]


def switch(engine, step, vocab=97):
    """One rollout and one training step; the answers."""
    engine.eval()
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14]]
    answers = engine.rollout(prompts, SamplingParams(4, stop_ids=(2,), seed=step)).tokens
    engine.train()
    draw = torch.Generator().manual_seed(step)
    batch = torch.randint(3, vocab, (2, 8), generator=draw)
    engine.backward(engine(input_ids=batch, labels=batch).loss)
    engine.step()
    return answers


def addresses(model):
    return [(p.data_ptr(), p.shape, p.stride(), p.dtype) for p in model.parameters()]


@STAGES
@DTYPES
def test_addresses_stay_over_50_switches(group, stage, dtype):
    model = llama().to(dtype)
    engine = engine_of(model, stage)
    start, before = addresses(model), [p.detach().clone() for p in model.parameters()]
    seen = set()
    for step in range(50):
        seen.add(str(switch(engine, step)))
        assert addresses(model) == start, step
    assert len(seen) > 25
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_sees_no_forward_of_a_rollout(group, stage, monkeypatch):
    """Its timers would make the host wait for the device at every token."""
    engine = engine_of(llama(), stage)
    seen = []
    prologue = engine.deepspeed_engine._forward_prologue
    monkeypatch.setattr(
        engine.deepspeed_engine, "_forward_prologue", lambda *a: (seen.append(1), prologue(*a))[1]
    )
    for step in range(3):
        switch(engine, step)
        assert len(seen) == step + 1  # the training forward


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_complaint_dsc18_100_switches_with_lora_and_gradient_checkpointing(group, stage):
    """Adapters learn, the frozen base keeps every bit, nothing moves; ZeRO-3 gives back."""
    model = llama()
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]), model
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    free = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    assert frozen.keys()
    assert free.keys()
    engine = engine_of(model, stage, lr=1e-2)
    start = addresses(model)
    for step in range(100):
        switch(engine, step)
        assert stage == 3 or addresses(model) == start
        if stage == 3 and step % 10 == 0:
            states = [p.ds_status.name for p in model.parameters()]
            assert "NOT_AVAILABLE" in states
            engine.rollout([[3]], SamplingParams(2))
            assert [p.ds_status.name for p in model.parameters()] == states
    shards = {
        n: (p.ds_tensor.view(p.ds_shape) if stage == 3 else p) for n, p in model.named_parameters()
    }
    assert all(torch.equal(shards[name], value) for name, value in frozen.items())
    assert all(not torch.equal(shards[name], value) for name, value in free.items())


@pytest.mark.parametrize(
    ("stage", "hybrid"),
    [
        (0, {}), (0, {"release_inference_cache": True}), (2, {}), (3, {}),
        (3, {"pin_parameters": False, "tp_gather_partition_size": 1}),
    ],
    ids=["zero0", "zero0-release", "zero2", "zero3-pinned", "zero3-unpinned"],
)  # fmt: skip
def test_complaint_peers21_memory_is_flat_over_50_iterations(group, stage, hybrid):
    """A copy of the weights left behind at each switch would add 16 MiB every time."""
    vocab = 8192
    model = llama(width=256, vocab=vocab)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weights > 16 * MIB
    engine = engine_of(model, stage, **hybrid)
    peaks, live, workspaces = [], [], []
    for step in range(50):
        switch(engine, step, vocab)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        workspaces.append(engine.generator.workspace_bytes)
        if step % 10 == 9:
            live.append(_live_bytes())
    # The peak of the process may creep by fragments; copies left behind would be forty.
    assert peaks[-1] - peaks[9] < 4 * weights
    assert max(live) - min(live) < MIB
    assert len(set(workspaces[1:])) == 1
    assert (workspaces[-1] == 0) is bool(hybrid.get("release_inference_cache"))


def _live_bytes():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance wakes lazy modules
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _add_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 2)


def _change_config(model):
    model.config.rms_norm_eps = 1e-3


def _turn_weight(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()  # square: same place, same shape


@pytest.mark.parametrize("change", [_add_hook, _change_config, _turn_weight])
def test_a_captured_forward_is_not_taken_for_a_changed_one(change):
    model = llama()
    inference = InferenceModel(model)
    before = inference.fingerprint()
    assert inference.fingerprint() == before
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)  # training changes values in place
    assert inference.fingerprint() == before

    change(model)

    assert inference.fingerprint() != before
