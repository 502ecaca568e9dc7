"""The engine on CUDA. Expected values come from transformers' generate and from the CPU."""

from __future__ import annotations

import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Generator, SamplingParams, initialize

VOCAB = 997
FAMILIES = ["opt", "llama", "mistral-window", "gemma2", "gpt2", "bloom", "mixtral"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _native_greedy(model, prompts, new_tokens):
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts]).cuda()
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]).cuda()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        do_sample=False, suppress_tokens=[2],
    )  # fmt: skip
    return out[:, longest:].tolist()


@pytest.mark.parametrize("max_slots", [None, 9])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_in_fp32(build, family, max_slots, prompts):
    model = build(family).cuda()
    want = _native_greedy(model, prompts, 40)
    params = SamplingParams(40, greedy=True, suppress_ids=(2,))
    got = Generator(model).rollout(prompts, params, max_slots=max_slots).tokens
    assert len({t for row in want for t in row}) >= 8
    assert got == want


def test_samples_equal_the_cpus_in_fp32(build, prompts):
    """Same counters, same inverse CDF: only a tie within rounding could part them."""
    model = build("llama")
    params = SamplingParams(40, seed=3, step=5, stop_ids=tuple(range(100, 130)))
    want = Generator(model).rollout(prompts, params)
    assert 0 < sum(want.stopped) < len(prompts)
    generator = Generator(model.cuda())
    for slots in (None, 7):
        got = generator.rollout(prompts, params, max_slots=slots)
        assert got.tokens == want.tokens
        assert got.stopped == want.stopped
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_bf16_logprobs_stay_near_the_training_forward(build, prompts):
    model = build("llama").cuda().bfloat16()
    rollout = Generator(model).rollout(prompts, SamplingParams(40, seed=1))
    gaps = []
    for prompt, tokens, logprobs in zip(prompts, rollout.tokens, rollout.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens]).cuda()).logits[0, len(prompt) - 1 : -1]
        want = logits.float().log_softmax(-1)[torch.arange(len(tokens)), tokens].cpu()
        gaps.append((logprobs - want).abs())
    assert torch.cat(gaps).mean() < 0.05


def test_workspace_memory_comes_back(build, prompts):
    model = build("llama").cuda()
    generator = Generator(model, HybridEngineSettings(release_inference_cache=True))
    generator.rollout(prompts, SamplingParams(8))
    before = torch.cuda.memory_allocated()
    generator.rollout(prompts, SamplingParams(64))
    assert torch.cuda.memory_allocated() == before


def test_an_impossible_workspace_names_wanted_and_free_bytes(build, monkeypatch):
    model = build("llama").cuda()
    generator = Generator(model)
    fraction = 0.01
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(RuntimeError, match=r"needs \d+ bytes, free on cuda:0: \d+ bytes"):
            generator.rollout([[5]] * 20_000, SamplingParams(200))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(generator.rollout([[5]], SamplingParams(4)).tokens) == 1


@pytest.mark.parametrize("stage", [0, 2])
def test_one_copy_under_deepspeed(build, stage, prompts, single_process):
    model = build("opt").cuda().bfloat16()
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
        },
    )
    addresses = [p.data_ptr() for p in model.parameters()]
    params = SamplingParams(24, greedy=True, suppress_ids=(2,))
    batch = torch.randint(3, VOCAB, (4, 32), device="cuda")
    seen = []
    for _ in range(3):
        engine.eval()
        rollout = engine.rollout(prompts, params)
        seen.append(rollout.tokens)
        # bf16: the engine's best token is among transformers' best, up to rounding.
        for prompt, tokens in list(zip(prompts, rollout.tokens, strict=True))[:6]:
            with torch.no_grad():
                ids = torch.tensor([prompt + tokens]).cuda()
                logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            logits[:, 2] = -torch.inf
            chosen = logits[torch.arange(len(tokens)), tokens]
            assert (logits.max(1).values - chosen).max() < 0.25
        engine.train()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    assert seen[0] != seen[1] != seen[2]
    assert [p.data_ptr() for p in model.parameters()] == addresses
