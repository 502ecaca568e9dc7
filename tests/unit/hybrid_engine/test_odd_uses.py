"""Rollouts in places where a script was not expected to make them."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as torch_dist
import transformers as tf
from torch import nn

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams, decode_state, initialize
from rlhf_app.training.distributed import close, setup

GREEDY = SamplingParams(10, greedy=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_cast_after_a_rollout(dtype, build, prompts, hf_greedy):
    model = build("llama")
    generator = Generator(model)
    generator.rollout(prompts, GREEDY)
    model.to(dtype)
    got = generator.rollout(prompts, GREEDY).tokens
    if dtype == torch.float64:
        assert got == hf_greedy(model, prompts, 10)
    fresh = Generator(model).rollout(prompts, GREEDY).tokens
    assert got == fresh
    model.float()
    assert len(generator.rollout(prompts, GREEDY).tokens) == len(prompts)


def test_autocast_before_and_after(build, prompts):
    model = build("llama")
    generator = Generator(model)
    plain = generator.rollout(prompts, GREEDY)
    with torch.autocast("cpu", torch.bfloat16):
        cast = generator.rollout(prompts, GREEDY)
        for prompt, row, logprobs in zip(prompts, cast.tokens, cast.logprobs, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
            want = logits.float().log_softmax(-1)[torch.arange(len(row)), row]
            gap = (logprobs - want).abs()
            assert gap.mean() < 0.05  # rounding; one position off is a hundred times that
            assert gap.max() < 0.3
    assert generator.capability.missing is None
    again = generator.rollout(prompts, GREEDY)
    assert again.tokens == plain.tokens
    torch.testing.assert_close(again.logprobs, plain.logprobs, atol=1e-6, rtol=0)


def test_the_first_rollout_under_autocast_is_no_reason_to_stay_native(build, prompts):
    model = build("llama")
    generator = Generator(model)
    with torch.autocast("cpu", torch.bfloat16):
        generator.rollout(prompts, GREEDY)
    assert (
        generator.rollout(prompts, GREEDY).tokens
        == Generator(model).rollout(prompts, GREEDY).tokens
    )
    assert generator.form != "native"


def test_inference_mode_leaves_nothing_behind(build, prompts, hf_greedy):
    model = build("llama")
    want = hf_greedy(model, prompts, 10)
    generator = Generator(model)
    with torch.inference_mode():
        assert generator.rollout(prompts, GREEDY).tokens == want
    assert generator.rollout(prompts, GREEDY).tokens == want
    ids = torch.tensor([[5, 6, 7]])
    model.train()
    model(ids, labels=ids).loss.backward()


def test_another_rollout_of_the_model_is_refused_while_one_runs(build, prompts):
    model = build("llama")
    generator, other = Generator(model), Generator(model)
    want = generator.rollout(prompts, GREEDY).tokens
    refused: list[str] = []

    def again(*_):
        for each in (generator, other):
            with pytest.raises(RuntimeError, match="is generating already") as error:
                each.rollout(prompts[:1], GREEDY)
            refused.append(str(error.value))

    hook = model.model.layers[0].register_forward_hook(again)
    assert generator.rollout(prompts, GREEDY).tokens == want
    hook.remove()
    assert refused

    results: list[object] = []

    def run():
        for _ in range(10):
            try:
                results.append(generator.rollout(prompts, GREEDY).tokens == want)
            except RuntimeError as error:
                results.append("generating already" in str(error))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 20
    assert model.config._attn_implementation == "sdpa"
    assert generator.rollout(prompts, GREEDY).tokens == want


@pytest.fixture
def single_process():
    if not torch_dist.is_initialized():
        setup()
    yield
    close()


class _Critic(nn.Module):
    """A model as DeepSpeed-Chat builds it: no transformers class, no config."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.rwtransformer, self.v_head = trunk, nn.Linear(32, 1, bias=False)


def test_initialize_takes_models_that_never_generate(build, single_process):
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {
        "lr": 1e-3, "torch_adam": True}}}  # fmt: skip
    for model, name in (
        (_Critic(build("llama").model), "_Critic"),
        (tf.LlamaForSequenceClassification(build("llama").config), "LlamaForSequenceClass"),
    ):
        engine, *_ = initialize(
            model=model, model_parameters=model.parameters(),
            config={**config, "hybrid_engine": {"release_inference_cache": True}},
        )  # fmt: skip
        engine.eval()
        engine.train()
        with pytest.raises(ConfigError, match=f"{name}.* cannot generate"):
            engine.rollout([[5]], GREEDY)


def test_kinds_of_sampling_that_come_once_are_not_kept(build, prompts):
    generator = Generator(build("llama"))
    for step in range(40):
        params = SamplingParams(2, temperature=1 + step / 100)
        generator.rollout(prompts[:2], params)
    assert len(generator._memory.state._constants) <= decode_state._MOST_KINDS


def test_a_probe_that_failed_once_is_repeated(build, prompts):
    model = build("llama")
    generator = Generator(model)

    def fail(*_):
        raise RuntimeError("CUDA out of memory")

    hook = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        generator.rollout(prompts, GREEDY)  # the native path meets the hook too
    hook.remove()
    generator.rollout(prompts, GREEDY)
    assert generator.form != "native"
    assert generator.capability.missing is None
