"""Log-probs computed in the place of a model's head, against what transformers computes."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

from rlhf_app.training import chunked_logprobs, head_scores
from rlhf_app.training.head_scores import score_tokens

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
MLP = {"intermediate_size": 24, "num_key_value_heads": 1}
CONFIGS = {
    "opt": lambda: tf.OPTConfig(**SHAPE, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0),
    "llama": lambda: tf.LlamaConfig(**SHAPE, **MLP),
    "llama-tied": lambda: tf.LlamaConfig(**SHAPE, **MLP, tie_word_embeddings=True),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=2,
        eos_token_id=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    ),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**SHAPE, intermediate_size=24),
    "phi": lambda: tf.PhiConfig(**SHAPE, **MLP),  # its head has a bias
    "gptj": lambda: tf.GPTJConfig(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, rotary_dim=4,
        resid_pdrop=0.0,
    ),
    "gemma2": lambda: tf.Gemma2Config(**SHAPE, **MLP, head_dim=8, final_logit_softcapping=3.0),
    "cohere": lambda: tf.CohereConfig(**SHAPE, **MLP, logit_scale=0.2),
    "granite": lambda: tf.GraniteConfig(**SHAPE, **MLP, logits_scaling=4.0),
}  # fmt: skip
CHUNKED = ["opt", "llama", "llama-tied", "gpt2", "gpt-neox", "phi", "gptj"]
WHOLE = ["gemma2", "cohere", "granite"]
TEMPERATURE, SUPPRESSED = 0.7, (0, 5)


def build(family):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family]())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.3)
            elif not weight.any():
                weight.normal_(0, 0.1)  # biases
    return model.train()


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Number of tokens of each call of the chunked function."""
    seen = []

    def count(hidden_NE, *rest, **options):
        seen.append(len(hidden_NE))
        return chunked_logprobs.chunked_logprobs(hidden_NE, *rest, **options)

    monkeypatch.setattr(head_scores, "chunked_logprobs", count)
    return seen


@pytest.fixture(params=[1 << 20, 4 * VOCAB * 2])
def block_bytes(request, monkeypatch):
    monkeypatch.setitem(chunked_logprobs.BLOCK_BYTES, "cpu", request.param)


def batch():
    """Ids, and of some tokens the positions whose logits predict them."""
    ids = torch.randint(6, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([4, 5, 8, 12, 13, 14, 22, 26])  # in the flattened ids
    return ids, targets - 1, ids.flatten()[targets]


def reference(model, ids, positions, targets):
    """From all logits of transformers' own forward."""
    scaled = model(input_ids=ids, use_cache=False).logits.float() / TEMPERATURE
    scaled[:, :, list(SUPPRESSED)] = -torch.inf
    logprobs = scaled.flatten(0, 1)[positions].log_softmax(-1)
    possible = logprobs[:, [i for i in range(logprobs.shape[1]) if i not in SUPPRESSED]]
    entropy = -(possible.exp() * possible).sum(-1)
    return logprobs[torch.arange(len(targets)), targets], entropy, logprobs.argmax(-1) == targets


def ours(model, ids, positions, targets, keep=7):
    return score_tokens(
        model, {"input_ids": ids, "logits_to_keep": keep}, positions, targets,
        temperature=TEMPERATURE, suppress_ids=SUPPRESSED, with_entropy=True, with_correct=True,
    )  # fmt: skip


def gradients(model, logprobs, entropy):
    weights = torch.linspace(-1, 2, len(logprobs))
    model.zero_grad()
    (logprobs * weights + entropy * weights.flip(0)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, tokens):
    got, want = ours(model, *tokens), reference(model, *tokens)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=0)
    found, expected = gradients(model, *got[:2]), gradients(model, *want[:2])
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        tolerance = 1e-5 * max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(gradient, expected[name], atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("family", CHUNKED)
def test_equals_log_softmax_of_all_logits(family, block_bytes, calls):
    assert_same(build(family), batch())
    assert calls == [8]


@pytest.mark.parametrize("family", WHOLE)
def test_logits_that_change_behind_the_head_are_left_to_the_model(family, calls, caplog):
    model = build(family)
    with caplog.at_level(logging.DEBUG, head_scores.__name__):
        assert_same(model, batch())
        ours(model, *batch())
    assert calls == []
    assert len(caplog.records) == 1
    assert "changes logits after its head" in caplog.text


def test_sft_loss_is_transformers_own():
    model = build("llama")
    ids, _, _ = batch()
    positions = torch.arange(27).view(3, 9)[:, :-1].flatten()
    scores = score_tokens(model, {"input_ids": ids}, positions, ids[:, 1:].flatten())
    want = model(input_ids=ids, labels=ids).loss
    assert -scores.logprobs.mean().item() == pytest.approx(want.item(), rel=1e-5)


def test_gradient_checkpointing(calls):
    model = build("llama")
    plain = gradients(model, *ours(model, *batch())[:2])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(model, batch())
    for name, gradient in gradients(model, *ours(model, *batch())[:2]).items():
        torch.testing.assert_close(gradient, plain[name])
    assert calls == [8, 8, 8]


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_adapters(targets, calls):
    """On other layers the frozen head computes log-probs; on the head peft's layer is called."""
    model = get_peft_model(build("llama"), LoraConfig(r=2, target_modules=targets))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.3)
    assert_same(model, batch())
    assert calls == ([] if "lm_head" in targets else [8])


def test_without_tokens_the_model_runs_and_has_gradients_of_zeros(calls):
    model = build("llama")
    ids, _, _ = batch()
    none = torch.empty(0, dtype=torch.long)
    ours(model, ids, none, none).logprobs.sum().backward()
    assert calls == [0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_model_that_ignores_logits_to_keep(calls):
    class Ignoring(tf.LlamaForCausalLM):
        def forward(self, *args, logits_to_keep=0, **kwargs):
            return super().forward(*args, **kwargs)

    model = Ignoring(CONFIGS["llama"]())
    assert_same(model, batch())
    assert calls == [8]


class Indexing(tf.LlamaForCausalLM):
    """Forbids a token, as some models of images do."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.index_fill(-1, torch.tensor([VOCAB - 1]), -30.0)
        assert output.logits[:, :, -1:].shape[-1] == 1
        return output


def hooked(model):
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.5)
    return model


def replaced(model):
    model.lm_head.forward = lambda hidden: F.linear(hidden, model.lm_head.weight) * 1.5
    return model


class Scaled(nn.Linear):
    def forward(self, hidden):
        return 1.5 * super().forward(hidden)


def subclassed(model):
    model.lm_head = Scaled(16, VOCAB, bias=False)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Indexing(CONFIGS["llama"]()),
        lambda: hooked(build("llama")),
        lambda: replaced(build("llama")),
        lambda: subclassed(build("llama")),
    ],
    ids=["indexes", "hook", "replaced", "subclass"],
)
def test_heads_that_are_not_only_a_product(make, calls):
    assert_same(make(), batch())
    assert calls == []


def test_the_head_is_as_before_also_after_an_error(calls):
    model = build("llama")
    ids, positions, targets = batch()
    ours(model, ids, positions, targets)
    assert "forward" not in model.lm_head.__dict__
    with pytest.raises(IndexError):
        ours(model, ids, positions + 1000, targets)
    assert "forward" not in model.lm_head.__dict__
    assert model(input_ids=ids).logits.shape == (3, 9, VOCAB)


def test_the_probe_is_made_once_and_draws_no_random_numbers(calls):
    model = build("llama")
    forwards = []
    model.register_forward_pre_hook(lambda *_: forwards.append(torch.rand(1)))
    state = torch.random.get_rng_state()
    ours(model, *batch())
    assert len(forwards) == 2
    ours(model, *batch())
    assert len(forwards) == 3
    torch.random.set_rng_state(state)
    assert torch.equal(torch.cat(forwards[1:]), torch.rand(2))


def test_autocast(calls):
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        got = ours(model, *batch())
        want = reference(model, *batch())
    torch.testing.assert_close(got.logprobs, want[0], atol=1e-5, rtol=0)
    assert calls == [8]


def test_bf16_weights(calls):
    model = build("opt").bfloat16()
    got, want = ours(model, *batch()), reference(model, *batch())
    assert got.logprobs.dtype == torch.float32
    torch.testing.assert_close(got.logprobs, want[0], atol=1e-5, rtol=0)
    assert calls == [8]


class _Cut(tf.LlamaForCausalLM):
    """The last ids are padding of the table."""

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = output.logits[..., :50]
        return output


class _Masked(tf.LlamaForCausalLM):
    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        output.logits = output.logits.clone()
        output.logits[..., 50:] = -1e9
        return output


def _scale(module, inputs, output):
    return output * 0.5


def _hook_on_head(model):
    model.lm_head.register_forward_hook(_scale)


def _hook_on_model(model):
    def halve(module, inputs, output):
        output.logits = output.logits * 0.5
        return output

    model.register_forward_hook(halve)


def _replaced_forward(model):
    own = model.forward

    def forward(*arguments, **named):
        output = own(*arguments, **named)
        output.logits = output.logits * 0.5
        return output

    model.forward = forward


def _assert_own_logprobs(model):
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    scored = score_tokens(model, {"input_ids": ids}, torch.arange(4), ids[0, 1:]).logprobs
    want = model(input_ids=ids).logits[0, :4].float().log_softmax(-1)
    torch.testing.assert_close(scored, want.gather(1, ids[0, 1:, None])[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [_Cut, _Masked])
def test_a_cut_or_masked_vocabulary_is_the_models_own(kind, calls):
    torch.manual_seed(0)
    model = kind(CONFIGS["llama"]()).eval()

    _assert_own_logprobs(model)

    assert calls == []


@pytest.mark.parametrize("change", [_hook_on_head, _hook_on_model, _replaced_forward])
def test_what_comes_after_the_first_call_is_seen(change, calls):
    model = build("llama").eval()
    _assert_own_logprobs(model)
    assert len(calls) == 1
    change(model)

    _assert_own_logprobs(model)

    assert len(calls) == 1


@pytest.mark.parametrize(
    ("family", "setting"), [("gemma2", "final_logit_softcapping"), ("granite", "logits_scaling")]
)
def test_a_config_that_changes_is_seen(family, setting, calls):
    model = build(family).eval()
    setattr(model.config, setting, None if family == "gemma2" else 1.0)
    _assert_own_logprobs(model)
    setattr(model.config, setting, 0.5)

    _assert_own_logprobs(model)
