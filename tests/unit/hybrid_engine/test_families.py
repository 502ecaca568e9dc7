"""Every family against transformers itself: its own generate, and its own training forward."""

import pytest
import torch
import transformers as tf

from rlhf_app.config.lora import LoraSettings
from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.attention import NAME
from rlhf_app.models.lora import attach

# Through transformers' attention interface, and through an adapter.
INTERFACE = [
    "opt", "opt-350m", "gpt2", "gpt2-inverse-layer-scale", "gptj", "codegen", "gpt-neox", "llama",
    "llama-mha", "llama3-rope", "linear-rope", "yarn-rope", "qwen2", "qwen2-window", "qwen3",
    "mistral-window", "gemma2", "gemma3", "phi", "phi3", "olmo2", "smollm3", "mixtral",
    "qwen2-moe",
]  # fmt: skip
ADAPTED = ["gpt-neo", "bloom", "bloom-6-heads", "falcon", "falcon-alibi", "falcon-gqa"]
SERVED = INTERFACE + ADAPTED
# These took up the attention interface late; before, the fallback serves them.
LATE = {"gptj", "codegen"} if tf.__version__ < "5.24" else set()
SAMPLED = SamplingParams(12, temperature=0.8, seed=3, step=2)
# Draws this close to a boundary of the distribution may go either way.
BOUNDARY = 1e-5


def _train_step(model, prompts):
    """One plain optimizer step that moves the greedy text."""
    ids = torch.tensor([p[:5] for p in prompts if len(p) >= 5])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


@pytest.mark.parametrize("family", SERVED)
def test_greedy_equals_transformers_before_and_after_an_update(
    family, build, prompts, hf_greedy, assert_same_greedy
):
    model = build(family)
    generator = Generator(model)
    params = SamplingParams(14, greedy=True)
    want = hf_greedy(model, prompts, 14)
    got = generator.rollout(prompts, params, max_slots=7).tokens
    assert (generator.capability.missing is None) == (family not in LATE)
    assert generator.capability.adapted == (family in ADAPTED)
    assert_same_greedy(model, prompts, got, want)
    _train_step(model, prompts)
    after = hf_greedy(model, prompts, 14)
    assert after != want
    assert_same_greedy(model, prompts, generator.rollout(prompts, params).tokens, after)


@pytest.mark.parametrize("family", SERVED)
def test_samples_and_logprobs_follow_the_training_forward(family, build, prompts, uniform):
    """The draw, made again from the logits of a forward over each whole row."""
    prompts = prompts[:12]
    model = build(family)
    generator = Generator(model)
    for update in (False, True):
        if update:
            _train_step(model, prompts)
        uids = [1000 + 7 * i for i in range(len(prompts))]
        rollout = generator.rollout(prompts, SAMPLED, uids, max_slots=5)
        for row, (prompt, answer) in enumerate(zip(prompts, rollout.tokens, strict=True)):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits.double() / SAMPLED.temperature, -1)
            want = logprobs[torch.arange(len(answer)), answer]
            torch.testing.assert_close(rollout.logprobs[row].double(), want, atol=1e-4, rtol=0)
            for index, token in enumerate(answer):
                u = uniform(SAMPLED.seed, SAMPLED.step, uids[row], index)
                below = logprobs[index, :token].exp().sum().item()
                upto = logprobs[index, : token + 1].exp().sum().item()
                assert below - BOUNDARY <= u <= upto + BOUNDARY


@pytest.mark.parametrize("family", SERVED)
def test_answers_end_where_transformers_ends_them(family, build, prompts, hf_greedy):
    model = build(family)
    free = hf_greedy(model, prompts, 14)
    # The stop token that divides the rows most evenly into ended and not ended.
    held = {token: sum(token in row[:-1] for row in free) for row in free for token in row}
    stop = min(held, key=lambda token: (abs(held[token] - len(prompts) / 2), token))
    want = hf_greedy(model, prompts, 14, eos_token_id=stop, pad_token_id=0)
    got = Generator(model).rollout(prompts, SamplingParams(14, greedy=True, stop_ids=(stop,)))
    assert 0 < sum(got.stopped) < len(prompts)
    for answer, stopped, row in zip(got.tokens, got.stopped, want, strict=True):
        assert answer == row[: len(answer)]
        assert stopped == (answer[-1] == stop)
        assert len(answer) == (row.index(stop) + 1 if stop in row else 14)


@pytest.mark.parametrize("family", ["longrope", "dynamic-rope"])
def test_rope_that_depends_on_the_batch_is_served_up_to_its_limit(
    family, build, prompts, hf_greedy, warnings_of
):
    """16 positions: rows up to there over the workspace, longer ones natively, alone."""
    prompts = prompts[:10]
    model = build(family)
    generator = Generator(model)
    short = [prompt[:6] for prompt in prompts]
    params = SamplingParams(10, greedy=True)
    with warnings_of() as warned:
        got = generator.rollout(short, params).tokens
    assert warned == []
    assert got == hf_greedy(model, short, 10)
    with warnings_of() as warned:
        long = generator.rollout(prompts, SamplingParams(14, greedy=True)).tokens
        generator.rollout(prompts[:2], SamplingParams(14, greedy=True))
    assert warned == [
        f"model type {model.config.model_type!r} lacks rotary positions fixed beyond 16 tokens: "
        "using native generate, which is slower"
    ]
    alone = [hf_greedy(model, [prompt], 14)[0] for prompt in prompts]
    assert long == alone
    assert long != hf_greedy(model, prompts, 14), "padding does not matter: nothing is tested"


@pytest.mark.parametrize("family", ["gpt-neo", "bloom", "falcon-gqa"])
def test_adapters_serve_low_rank_layers(family, build, prompts, hf_greedy, assert_same_greedy):
    model = build(family)
    without = Generator(model).rollout(prompts, SamplingParams(10, greedy=True)).tokens
    attach(model, LoraSettings(rank=4), seed=0, base=family, setting="actor.lora")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.05)
    got = Generator(model).rollout(prompts, SamplingParams(10, greedy=True)).tokens
    assert got != without
    assert_same_greedy(model, prompts, got, hf_greedy(model, prompts, 10))


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_leave_no_trace(family, build, prompts):
    model = build(family)
    ids = torch.tensor([prompts[1]])
    before = model(ids).logits
    own = {id(module) for module in model.modules() if "forward" in module.__dict__}
    generator = Generator(model)
    assert generator.capability.missing is None
    seen = []

    def fail(module, args):
        seen.append(model.config._attn_implementation)
        raise KeyError("broken")

    hook = model.get_output_embeddings().register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="broken"):
        generator.rollout(prompts, SamplingParams(4))
    hook.remove()
    assert seen == [NAME]
    assert {id(module) for module in model.modules() if "forward" in module.__dict__} == own
    assert torch.equal(model(ids).logits, before)
    generator.rollout(prompts, SamplingParams(4))
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_adapters_keep_a_forward_that_was_on_the_instance(build, prompts):
    model = build("bloom")
    layer = model.transformer.h[0].self_attention
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return type(layer).forward(layer, *args, **kwargs)

    layer.forward = counted
    generator = Generator(model)
    generator.rollout(prompts, SamplingParams(4))
    calls.clear()  # the probe's training forward
    generator.rollout(prompts, SamplingParams(4))
    assert calls == []
    assert layer.forward is counted


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("bloom-6-heads", torch.float32),
        ("bloom-6-heads", torch.bfloat16),
        ("falcon-alibi", torch.float32),
    ],
)
def test_positions_far_out_are_rounded_as_in_the_training_forward(family, dtype, build):
    """BLOOM rounds logits and bias to the model's type, Falcon its bias to bfloat16, always."""
    model = build(family).to(dtype)
    generator = Generator(model, HybridEngineSettings(max_out_tokens=600))
    prompt = [(7 * i) % 94 + 3 for i in range(588)]
    got = generator.rollout([prompt], SamplingParams(12, seed=1))
    assert generator.capability.missing is None
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *got.tokens[0]]])).logits[0, 587:-1].float()
    want = torch.log_softmax(logits, -1)[torch.arange(12), got.tokens[0]]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got.logprobs[0], want, atol=tolerance, rtol=0)
