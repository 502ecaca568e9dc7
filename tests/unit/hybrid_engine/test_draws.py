"""Tokens that are not drawn as asked are found, though their log-probs are right."""

import json
import math

import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import HybridEngine, SamplingParams
from rlhf_app.hybrid_engine import draws as draws_module
from rlhf_app.hybrid_engine.decode_state import DecodeState
from rlhf_app.hybrid_engine.draws import end_problems, judge_tokens, score_row
from rlhf_app.hybrid_engine.rollout_check import RolloutMismatch, check_rollouts
from rlhf_app.hybrid_engine.sampling import Sampler, request_keys, uniforms
from rlhf_app.hybrid_engine.verify import Verifier
from rlhf_app.training.distributed import Dist

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 20))]
ALONE = Dist(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
DTYPES = [torch.float32, torch.bfloat16]
PARAMS = SamplingParams(16, temperature=0.7, stop_ids=(2,), suppress_ids=(3,))


class _Engine:
    """Stands where DeepSpeed's engine stands."""

    module_forward_pre_hook = None
    module_forward_post_hook = None

    def __init__(self, module):
        self.module = module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.5)

    def train(self):
        self.module.train()

    def eval(self):
        self.module.eval()

    def zero_optimization_stage(self):
        return 0

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.optimizer.step()

    def __call__(self, **inputs):
        return self.module(**inputs)


def engine_of(model):
    engine = HybridEngine(_Engine(model), HybridEngineSettings())
    engine.generator.capability  # noqa: B018 - the probe: what follows gets past it
    return engine


def planted(choose, greedy):
    """A sampler that draws `choose(filtered logits)`, with the log-probs of that."""
    right = Sampler.__call__

    def call(self, logits_BV, uniforms_B):
        if self._params.greedy is not greedy:
            return right(self, logits_BV, uniforms_B)
        logprobs_BV = self.filtered(logits_BV).log_softmax(-1)
        tokens_B = choose(logprobs_BV)
        return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]

    return call


SAMPLED, GREEDY = "sampled tokens are not drawn", "greedy tokens are not the most likely"
FAULTS = {
    "always one token": (lambda z: torch.full((len(z),), 7), False, SAMPLED),
    "any token": (lambda z: z.isfinite().float().multinomial(1)[:, 0], False, SAMPLED),
    "greedy where sampling": (lambda z: z.argmax(1), False, SAMPLED),
    "other uniforms": (lambda z: z.exp().multinomial(1)[:, 0], False, SAMPLED),
    "one token where greedy": (lambda z: torch.full((len(z),), 7), True, GREEDY),
    "second best where greedy": (lambda z: z.topk(2).indices[:, 1], True, GREEDY),
}


@pytest.fixture
def plant(monkeypatch):
    """`plant(name)` breaks how answers are drawn; returns what shall be said of it."""

    def run(name):
        torch.manual_seed(0)
        if name == "stop ids ignored":
            record = DecodeState.record

            def unstoppable(self, state, logits_BV):
                kept, self._stop_ids = self._stop_ids, self._stop_ids + 1000
                try:
                    record(self, state, logits_BV)
                finally:
                    self._stop_ids = kept

            monkeypatch.setattr(DecodeState, "record", unstoppable)
            return "goes on after stop id"
        if name == "suppressed ids drawn":
            call = Sampler.__call__

            def unsuppressed(self, logits_BV, uniforms_B):
                kept, self._suppress = self._suppress, None
                try:
                    return call(self, logits_BV, uniforms_B)
                finally:
                    self._suppress = kept

            monkeypatch.setattr(Sampler, "__call__", unsuppressed)
            return "suppressed ids"
        choose, greedy, reason = FAULTS[name]
        monkeypatch.setattr(Sampler, "__call__", planted(choose, greedy))
        return reason

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [*FAULTS, "stop ids ignored"])
def test_ppo_does_not_start_on_wrong_draws(fault, dtype, build, prompts, plant):
    engine = engine_of(build("llama").to(dtype))
    check_rollouts(engine, prompts, PARAMS, ALONE)
    reason = plant(fault)
    with pytest.raises(RolloutMismatch, match=reason):
        check_rollouts(engine, prompts, PARAMS, ALONE)


def test_ppo_does_not_start_where_suppressed_ids_are_drawn(build, prompts, plant):
    engine = engine_of(build("llama"))
    plant("suppressed ids drawn")
    with pytest.raises(RolloutMismatch):
        check_rollouts(engine, prompts, PARAMS, ALONE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_passes_what_is_right(dtype, build):
    found = Verifier(engine_of(build("llama").to(dtype)), ALONE, 0).run("")
    assert found.problems == []
    for draws in found.draws:
        assert (draws.greedy.tokens, draws.answers) == (128, 12)  # 4 answers of 32, thrice
        assert 128 < draws.sampled.tokens < 256  # two of the last four end early
        assert draws.sampled.misses <= (0 if dtype == torch.float32 else 40)


@pytest.mark.parametrize("fault", [*FAULTS, "stop ids ignored", "suppressed ids drawn"])
def test_verify_finds_wrong_draws(fault, build, plant):
    engine = engine_of(build("llama").to(torch.bfloat16))
    reason = plant(fault)
    found = Verifier(engine, ALONE, 0).run("")
    assert [p[:12] for p in found.problems if reason in p] == ["generate 1: ", "generate 2: "]


def test_verify_says_that_weights_are_broken(build):
    """And leaves findings that are JSON."""
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    found = Verifier(engine_of(model), ALONE, 0).run("")
    (problem,) = found.problems
    assert problem.startswith("the training forward's logits are not finite: 48 of 4,656 are NaN")
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gemma2", "mixtral"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_right_engine_is_stopped(seed, family, dtype, build, prompts):
    engine = engine_of(build(family, seed).to(dtype))
    params = SamplingParams(32, temperature=(1.0, 0.7)[seed % 2], stop_ids=(2,), seed=seed)
    check_rollouts(engine, prompts[seed:], params, ALONE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_that_change_places_are_no_error(dtype, build, prompts, plant):
    """In bf16 a token's experts nearly tie now and then; a wrong sampler is still found."""
    engine = engine_of(build("mixtral", 16).to(dtype))
    check_rollouts(engine, prompts, PARAMS, ALONE)
    reason = plant("greedy where sampling")
    with pytest.raises(RolloutMismatch, match=reason):
        check_rollouts(engine, prompts, PARAMS, ALONE)


def test_uniforms_are_the_engines_and_the_references(uniform):
    drawn = uniforms(request_keys(9, 4, [0, 3]), 6)
    for row, uid in enumerate([0, 3]):
        for index in range(6):
            want = uniform(9, 4, uid, index)
            assert draws_module.uniform(9, 4, uid, index) == want == drawn[row, index].item()


def test_a_token_against_its_uniform_by_hand(monkeypatch):
    """Probabilities 1/2, 1/4, 1/4, and a fourth id that is suppressed."""
    logits = torch.tensor([[2.0, 1.0, 1.0, 9.0]]).log() * 2  # temperature 2
    params = SamplingParams(1, temperature=2.0, suppress_ids=(3,))
    row = score_row(logits, [1], params)
    assert [v.item() for v in row] == pytest.approx([math.log(0.25), 0.5, 0.75, math.log(2)])
    # Gap d = .1: e^.1 - 1 = .10517; below the token that times 1/2, above it times 1/4.
    for u, misses, distance, worst in (
        (0.51, 0, 0.0, 0.0),
        (0.749, 0, 0.0, 0.0),
        (0.48, 1, 0.02, 0.02 / 0.052585),
        (0.77, 1, 0.02, 0.02 / 0.026293),
        (0.40, 1, 0.10, 0.10 / 0.052585),
    ):
        monkeypatch.setattr(draws_module, "uniform", lambda *_, u=u: u)
        got = judge_tokens([row], params, 0.05, 0.1)
        assert (got.tokens, got.misses, got.forbidden) == (1, misses, 0)
        assert (got.mean, got.worst) == pytest.approx((distance, worst), rel=1e-4)
        assert got.ok is (distance <= 0.05 and worst <= 1)
    forbidden = judge_tokens([score_row(logits, [3], params)], params, 0.05, 0.1)
    assert (forbidden.forbidden, forbidden.ok) == (1, False)
    # Greedy: ln 2 nats below the best; allowed are 2 d.
    greedy = SamplingParams(1, temperature=2.0, suppress_ids=(3,), greedy=True)
    for bound, ok in ((0.34, False), (0.36, True)):
        assert judge_tokens([row], greedy, bound, bound).ok is ok


@pytest.mark.parametrize(
    ("answer", "stopped", "problem"),
    [
        ([5, 9], True, None),
        ([9], True, None),
        ([5, 6, 7], False, None),
        ([5, 6, 9], True, None),
        ([5, 9, 6], False, "goes on after stop id 9"),
        ([5, 6], False, "has 2 tokens, not 3"),
        ([5, 6, 7, 9], True, "has 4 tokens, not 3"),
        ([], False, "has 0 tokens, not 3"),
        ([5, 9], False, "ends with 9 and is said to be not stopped"),
        ([5, 6, 7], True, "ends with 7 and is said to be stopped"),
    ],
)
def test_where_answers_end(answer, stopped, problem):
    found = end_problems([[9], answer], [True, stopped], SamplingParams(3, stop_ids=(8, 9)))
    assert found == ([] if problem is None else [f"answer 1 {problem}"])
