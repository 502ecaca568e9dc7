from types import SimpleNamespace

import pytest
import torch

from rlhf_app.hybrid_engine import capability, mask_window
from rlhf_app.hybrid_engine.capability import probe
from rlhf_app.hybrid_engine.host_reads import HostReads
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import LayerShape
from rlhf_app.hybrid_engine.positions import batch_dependent_from, most_positions


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
        ("falcon-h1", "a state of attention keys and values alone"),
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
        (lambda b, h, q, k: k <= q, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 1), 1),
        (lambda b, h, q, k: (k <= q) & (k > q - 4097), 4097),
        (lambda b, h, q, k: k <= q + 1, mask_window.OTHER),
        (lambda b, h, q, k: k < q, mask_window.OTHER),
        (lambda b, h, q, k: torch.zeros(4)[q] == torch.zeros(4)[k], mask_window.OTHER),
    ],
)
def test_masks_are_read_as_windows(function, window):
    assert mask_window.read(mask_window.encode(mask_function=function)) == window


def test_other_masks_are_refused_where_a_layer_uses_them(build, monkeypatch):
    other = torch.tensor(mask_window.OTHER.value)
    monkeypatch.setattr(mask_window, "encode", lambda **_: other)
    mask_window.register(capability._PROBE)
    try:
        assert "a causal attention mask that depends on positions" in _probe(build("llama")).missing
    finally:
        monkeypatch.undo()
        mask_window.register(capability._PROBE)
    assert _probe(build("llama")).missing is None


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


@pytest.mark.parametrize(
    ("family", "most", "native_beyond"),
    [
        ("llama", 64, None),
        ("llama3-rope", 64, None),
        ("longrope", 64, 16),
        ("dynamic-rope", None, 16),
        ("gemma3", 64, None),
        ("bloom", None, None),
        ("mpt", 64, None),
    ],
)
def test_positions_have_limits(family, most, native_beyond, build):
    found = _probe(build(family))
    assert found.max_positions == most
    assert found.engine_positions == (native_beyond if found.missing is None else None)


def test_a_rope_per_kind_of_layer_is_looked_into():
    config = SimpleNamespace(
        max_position_embeddings=128,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
        },
    )
    assert batch_dependent_from(config) == 128
    assert most_positions(config) is None
    assert most_positions(SimpleNamespace(max_position_embeddings=-1)) is None


@pytest.mark.parametrize(
    ("family", "read"),
    [("llama", None), ("mixtral", None), ("dynamic-rope", "_local_scalar_dense")],
)
def test_reads_on_the_host_are_noticed(family, read, build):
    assert _probe(build(family)).host_read == read


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (lambda x: x.max().item(), "_local_scalar_dense"),
        (lambda x: bool(x.sum() > 0), "_local_scalar_dense"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: x[torch.tensor([0, 1])] + x.argmax(), None),
        (lambda x: torch.where(x > 0, x, 0.0).scatter(0, torch.tensor([1]), 1.0), None),
    ],
)
def test_which_operations_read(operation, name):
    with HostReads() as reads:
        operation(torch.tensor([1.0, -2.0, 3.0]))
    assert reads.first == name


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
