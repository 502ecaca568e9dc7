"""Captured decode steps: the same answers as eager ones, and never stale."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Generator, SamplingParams, initialize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GRAPH = "cuda graph"
GREEDY = SamplingParams(40, greedy=True, suppress_ids=(2,))
SAMPLED = SamplingParams(40, seed=3, step=5, temperature=0.8, stop_ids=tuple(range(100, 130)))
FILTERED = SamplingParams(40, seed=4, top_k=50, top_p=0.9, stop_ids=tuple(range(100, 130)))


def _eager(model, **settings):
    return Generator(model, HybridEngineSettings(enable_cuda_graph=False, **settings))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, FILTERED])
@pytest.mark.parametrize("release", [False, True])
def test_graphs_answer_as_eager_steps_do(build, prompts, params, release):
    model = build("llama").cuda()
    want = _eager(model).rollout(prompts, params, max_slots=9)
    assert want.timings.form.startswith("eager")
    generator = Generator(model, HybridEngineSettings(release_inference_cache=release))
    for _ in range(3):
        got = generator.rollout(prompts, params, max_slots=9)
        assert got.timings.form == GRAPH
        assert got.tokens == want.tokens
        assert got.stopped == want.stopped
        torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=0)
        held = torch.full((1 << 22,), torch.nan, device="cuda")  # takes memory that was freed
    assert held.isnan().all()
    assert (generator.workspace_bytes == 0) == release


def test_weights_that_change_in_place_are_followed_without_a_new_capture(build, prompts):
    model = build("llama").cuda()
    generator = Generator(model)
    first = generator.rollout(prompts, GREEDY).tokens
    graphs = {key: graph.graph for key, graph in generator._memory.step._graphs.items()}
    assert graphs
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    second = generator.rollout(prompts, GREEDY).tokens
    assert second != first
    assert second == _eager(model).rollout(prompts, GREEDY).tokens
    assert {key: graph.graph for key, graph in generator._memory.step._graphs.items()} == graphs


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_that_moved_is_never_read_at_its_old_address(build, prompts, name):
    model = build("llama").cuda()
    generator = Generator(model)
    first = generator.rollout(prompts, GREEDY).tokens
    weight = model.get_parameter(name)
    old = weight.data
    weight.data = old * torch.rand_like(old)
    old.fill_(torch.nan)
    second = generator.rollout(prompts, GREEDY).tokens
    assert second != first
    assert second == _eager(model).rollout(prompts, GREEDY).tokens


def test_another_kind_of_sampling_gets_its_own_graph(build, prompts):
    model = build("llama").cuda()
    generator = Generator(model)
    for params in (GREEDY, SAMPLED, GREEDY, FILTERED, SAMPLED):
        got = generator.rollout(prompts, params)
        assert got.tokens == _eager(model).rollout(prompts, params).tokens


def test_a_longer_rollout_moves_the_workspace_and_the_graphs_with_it(build, prompts):
    model = build("opt").cuda()
    generator = Generator(model)
    for tokens in (8, 100, 30):
        params = SamplingParams(tokens, greedy=True, suppress_ids=(2,))
        assert (
            generator.rollout(prompts, params).tokens
            == _eager(model).rollout(prompts, params).tokens
        )


def test_a_step_that_waits_for_the_host_runs_eagerly_with_one_warning(build, prompts, caplog):
    model = build("llama").cuda()
    want = _eager(model).rollout(prompts, GREEDY).tokens

    def wait(module, args, output):
        output.sum().item()

    model.model.layers[0].mlp.register_forward_hook(wait)
    generator = Generator(model)
    with caplog.at_level(logging.WARNING, logger="rlhf_app"):
        for _ in range(2):
            rollout = generator.rollout(prompts, GREEDY)
            assert rollout.tokens == want
            assert "cannot be captured" in rollout.timings.form
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), drawn)
    assert len([r for r in caplog.records if "without CUDA graphs" in r.getMessage()]) == 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_graphs_follow_training_steps(build, prompts, single_process, stage):
    model = build("opt").cuda()
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
        },
    )
    addresses = [p.data_ptr() for p in model.parameters()]
    batch = torch.randint(3, 900, (4, 32), device="cuda")
    seen, peaks = [], []
    for _ in range(12):
        engine.eval()
        rollout = engine.rollout(prompts, GREEDY)
        assert rollout.timings.form == GRAPH
        compared = len(seen) % 4 == 3  # needs a second workspace
        if compared:
            assert rollout.tokens == _eager(model).rollout(prompts, GREEDY).tokens
        seen.append(rollout.tokens)
        engine.train()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        if not compared:
            peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    assert all(a != b for a, b in itertools.pairwise(seen))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert max(peaks[2:]) == min(peaks[2:]), peaks
