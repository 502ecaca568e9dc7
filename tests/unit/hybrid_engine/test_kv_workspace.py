import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.kv_workspace import KVWorkspace, LayerShape

CPU = torch.device("cpu")
SHAPES = [LayerShape(2, 4, 4), LayerShape(1, 8, 6), LayerShape(2, 4, 4)]


@pytest.fixture
def workspace() -> KVWorkspace:
    made = KVWorkspace(SHAPES, torch.float32, CPU)
    made.borrow(3, 5)
    return made


def test_layers_have_their_own_shapes_and_bytes(workspace):
    assert [tuple(k.shape) for k in workspace.keys] == [(3, 2, 5, 4), (3, 1, 5, 8), (3, 2, 5, 4)]
    assert [tuple(v.shape) for v in workspace.values] == [(3, 2, 5, 4), (3, 1, 5, 6), (3, 2, 5, 4)]
    tensors = [*workspace.keys, *workspace.values]
    assert workspace.nbytes == sum(t.numel() * 4 for t in tensors) == 2760
    workspace.keys[0][0, 0, 0, 0] = 1.0
    assert workspace.keys[2][0, 0, 0, 0] == 0.0


def test_a_large_enough_workspace_is_kept_and_cleared(workspace):
    address = workspace.keys[1].data_ptr()
    workspace.keys[1].fill_(float("nan"))
    workspace.borrow(2, 4)
    assert workspace.keys[1].data_ptr() == address
    assert not workspace.keys[1].any()
    workspace.borrow(4, 4)
    assert (workspace.slots, workspace.positions) == (4, 5)


def test_release_gives_everything_back(workspace):
    workspace.release()
    assert workspace.nbytes == 0
    assert workspace.keys == []
    with pytest.raises(IndexError, match="holds 0 rows"):
        workspace.check(1, 1)


@pytest.mark.parametrize(("slots", "positions"), [(4, 1), (1, 6)])
def test_out_of_bounds_is_an_index_error(workspace, slots, positions):
    workspace.check(3, 5)
    with pytest.raises(IndexError, match="holds 3 rows of 5 tokens"):
        workspace.check(slots, positions)


def test_move_copies_the_live_part_of_rows_in_every_layer(workspace):
    for index, tensor in enumerate([*workspace.keys, *workspace.values]):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 1000 * index)
    before = [t.clone() for t in [*workspace.keys, *workspace.values]]
    workspace.copy([2], [0], 3)
    for old, new in zip(before, [*workspace.keys, *workspace.values], strict=True):
        assert torch.equal(new[0, :, :3], old[2, :, :3])
        assert torch.equal(new[0, :, 3:], old[0, :, 3:])
        assert torch.equal(new[1:], old[1:])


def test_allocation_is_tried_twice(monkeypatch):
    workspace = KVWorkspace(SHAPES, torch.float32, CPU)
    real, calls = torch.zeros, []

    def zeros(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("full")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", zeros)
    workspace.borrow(3, 5)
    assert workspace.nbytes == 2760


def test_two_failures_are_an_error_with_the_bytes_wanted(monkeypatch):
    workspace = KVWorkspace(SHAPES, torch.float32, CPU)

    def zeros(*_, **__):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(RuntimeError, match="3 rows of 5 tokens needs 2760 bytes, free on cpu"):
        workspace.borrow(3, 5)
    assert workspace.nbytes == 0


_LAYERS = st.lists(
    st.builds(LayerShape, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    min_size=1, max_size=5,
)  # fmt: skip
_SIZES = st.tuples(st.integers(1, 6), st.integers(1, 12))
_STEPS = st.lists(st.one_of(_SIZES, st.just("release")), min_size=1, max_size=8)


@settings(deadline=None)
@given(_LAYERS, st.sampled_from([torch.float32, torch.bfloat16]), _STEPS)
def test_accounting_is_exact(layers, dtype, steps):
    """Bytes said are bytes held, whatever was borrowed and given back before."""
    workspace = KVWorkspace(layers, dtype, CPU)
    slots = positions = 0
    for step in steps:
        if step == "release":
            workspace.release()
            slots = positions = 0
        else:
            addresses, fits = workspace.addresses, step[0] <= slots and step[1] <= positions
            promised = workspace.bytes_for(max(slots, step[0]), max(positions, step[1]))
            workspace.borrow(*step)
            slots, positions = max(slots, step[0]), max(positions, step[1])
            assert workspace.nbytes == promised
            assert not fits or workspace.addresses == addresses
        assert (workspace.slots, workspace.positions) == (slots, positions)
        tensors = [*workspace.keys, *workspace.values]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(storages.values()) == workspace.nbytes
        per_token = sum(s.kv_heads * (s.key_dim + s.value_dim) for s in layers)
        assert workspace.nbytes == per_token * slots * positions * dtype.itemsize
        for index, tensor in enumerate(tensors):
            tensor.fill_(index)  # layers overlap nowhere
        assert all(bool((t == i).all()) for i, t in enumerate(tensors))
        for far in ((slots + 1, positions), (slots, positions + 1)):
            with pytest.raises(IndexError):
                workspace.check(*far)


def test_a_release_leaves_no_buffer_behind(build):
    generator = Generator(build("llama"))
    generator.rollout([[5, 6, 7], [8]], SamplingParams(4))
    state = generator._memory.state
    buffers = [state._tokens_NT, state._logprobs_NT, state._uniforms_NT, state.rows]
    held = [weakref.ref(buffer) for buffer in buffers]
    del buffers

    generator.release()

    assert [buffer() for buffer in held] == [None] * 4


def test_memory_comes_back_with_the_generator_without_a_collection(build):
    generator = Generator(build("llama"))
    generator.rollout([[5, 6, 7], [8]], SamplingParams(4))
    workspace = weakref.ref(generator._memory._workspace)
    gc.collect()
    gc.disable()
    try:
        del generator
        assert workspace() is None
    finally:
        gc.enable()
