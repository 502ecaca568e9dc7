import pytest
import torch

from rlhf_app.hybrid_engine import capability
from rlhf_app.hybrid_engine.capability import probe
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import LayerShape


def _probe(model):
    return probe(InferenceModel(model))


def test_layer_shapes_come_from_the_calls(build):
    assert _probe(build("llama")).layers == (LayerShape(2, 8, 8),) * 3
    assert _probe(build("opt")).layers == (LayerShape(4, 8, 8),) * 3
    assert _probe(build("opt")).max_positions == 64


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("mpt", "position_ids"),
        ("gpt-oss", "attention argument 's_aux'"),
        ("falcon-h1", "a state that lives in the attention alone"),
        ("xglm", "a forward that runs over the workspace .ValueError: Attention mask"),
    ],
)
def test_what_is_missing_is_named(family, missing, build):
    found = _probe(build(family))
    assert found.layers == ()
    with pytest.raises(AssertionError, match=missing):
        raise AssertionError(found.missing)


def test_a_layer_that_is_skipped_is_noticed(build, monkeypatch):
    model = build("llama")
    monkeypatch.setattr(
        type(model.model.layers[1]), "forward",
        lambda self, hidden, **_: hidden, raising=True,
    )  # fmt: skip
    assert "0 of 3 layers" in _probe(model).missing


def test_a_shared_layer_is_noticed(build):
    model = build("llama")
    model.model.layers[2] = model.model.layers[1]
    assert "called twice" in _probe(model).missing


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (lambda b, h, q, k: k <= q, 0),
        (lambda b, h, q, k: (k <= q) & (k > q - 1), 1),
        (lambda b, h, q, k: (k <= q) & (k > q - 4097), 4097),
    ],
)
def test_masks_are_read_as_windows(function, window):
    assert capability._mask_window(mask_function=function).item() == window


def test_other_masks_are_refused():
    with pytest.raises(capability.Unsupported, match="causal"):
        capability._mask_window(mask_function=lambda b, h, q, k: k <= q + 1)
    table = torch.zeros(4)
    with pytest.raises(capability.Unsupported, match="positions only"):
        capability._mask_window(mask_function=lambda b, h, q, k: table[q] == table[k])


def test_a_window_in_the_mask_alone_is_refused(build, monkeypatch):
    """A family that only masks, without saying sliding_window, would be served wrongly."""
    model = build("mistral-window")
    forward = type(model.model.layers[0].self_attn).forward
    seen = []

    def hide_window(self, *args, **kwargs):
        self.config.sliding_window, kept = None, self.config.sliding_window
        seen.append(kept)
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.config.sliding_window = kept

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", hide_window)
    assert "a mask of window 5 with sliding_window=None" in _probe(model).missing
    assert seen


def test_rope_that_depends_on_the_batch_bounds_the_engine(build):
    model = build("llama")
    assert _probe(model).engine_positions is None
    model.config.rope_parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
    }  # fmt: skip
    assert _probe(model).engine_positions == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["opt", "llama", "gemma2", "mistral-window", "mixtral"])
def test_the_numeric_check_allows_for_the_precision(family, dtype, build):
    for seed in range(3):
        assert _probe(build(family, seed).to(dtype)).missing is None
    model = build(family)
    state = torch.get_rng_state()
    _probe(model)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numeric_check_sees_a_state_elsewhere(dtype, build, monkeypatch):
    model = build("falcon-h1").to(dtype)
    monkeypatch.setattr(type(model), "_is_stateful", False)
    assert "decoded logits equal to the training forward's" in _probe(model).missing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numeric_check_sees_a_wrong_decode(dtype, build, monkeypatch):
    decode = InferenceModel.decode
    monkeypatch.setattr(InferenceModel, "decode", lambda s, t, p, k: decode(s, t, p + 1, k))
    assert "decoded logits" in _probe(build("gpt2").to(dtype)).missing


def test_a_long_error_is_cut(build, monkeypatch):
    def fail(*_):
        raise ValueError("x " * 500)

    monkeypatch.setattr(InferenceModel, "prefill", fail)
    assert len(_probe(build("llama")).missing) < 200
