import math

import numpy as np
import pytest
import torch

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import SamplingParams
from rlhf_app.hybrid_engine.sampling import Sampler, request_keys, uniforms

CPU = torch.device("cpu")


def _logits(rows: int = 3, vocab: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_uniforms_equal_splitmix64_in_python_integers():
    """Second implementation: splitmix64's published step, on unbounded integers."""
    keys = request_keys(1234, 7, [0, 1, 2**63 + 5, -3])
    got = uniforms(keys, 5)
    for row, key in enumerate(keys.tolist()):
        state = key % 2**64
        for column in range(5):
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = state
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
            z ^= z >> 31
            assert got[row, column].item() == (2 * (z >> 24) + 1) / 2**41


def test_splitmix64_matches_its_published_first_outputs():
    """Seed 1234567: 6457827717110365317, 3203168211198807973 (the reference C code)."""
    got = uniforms(torch.tensor([1234567]), 2)[0].tolist()
    want = [(2 * (z >> 24) + 1) / 2**41 for z in (6457827717110365317, 3203168211198807973)]
    assert got == want


def test_uniforms_are_uniform_and_uncorrelated():
    u = uniforms(request_keys(0, 0, range(2000)), 50)
    counts = torch.histc(u.float(), 20, 0, 1)
    chi2 = ((counts - 5000) ** 2 / 5000).sum().item()
    assert chi2 < 43.8  # 99.9 % quantile for 19 degrees of freedom
    for a, b in ((u[:, 0], u[:, 1]), (u[:-1, 0], u[1:, 0])):
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 4 / math.sqrt(2000)


def test_keys_differ_by_seed_step_and_uid():
    keys = [
        request_keys(seed, step, [uid]).item()
        for seed in range(8)
        for step in range(8)
        for uid in range(8)
    ]
    assert len(set(keys)) == 512


def test_sampling_frequencies_follow_the_softmax():
    """Pearson's chi-square against probabilities from torch, 99.9 % quantile of 11 d.o.f."""
    logits = _logits(1, 12, seed=3)
    draws = 40_000
    u = uniforms(request_keys(5, 0, range(draws)), 1)[:, 0]
    tokens, _ = Sampler(SamplingParams(1, temperature=1.3), CPU)(logits.expand(draws, -1), u)
    expected = torch.softmax(logits[0].double() / 1.3, 0) * draws
    counts = torch.bincount(tokens, minlength=12).double()
    assert ((counts - expected) ** 2 / expected).sum().item() < 31.3


def test_inverse_cdf_by_hand():
    """Probabilities 1/2, 0, 1/4, 1/4: boundaries of the CDF lie at 1/2 and 3/4."""
    logits = torch.tensor([[math.log(2), -math.inf, 0.0, 0.0]]).expand(6, 4)
    u = torch.tensor([1e-9, 0.4999, 0.5001, 0.7499, 0.7501, 1 - 2**-41], dtype=torch.float64)
    tokens, logprobs = Sampler(SamplingParams(1), CPU)(logits, u)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(
        logprobs.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("last", [1e-9, 0.0])
def test_the_largest_uniform_never_leaves_the_support(last):
    probs = torch.tensor([[0.7, 0.3 - last, last, 0.0]])
    u = torch.full((1,), 1 - 2**-41, dtype=torch.float64)
    tokens, _ = Sampler(SamplingParams(1), CPU)(probs.log(), u)
    assert tokens.item() == (2 if last else 1)


@pytest.mark.parametrize("vocabulary", [97, 1024, 1025, 4096, 5003, 50_257])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_tokens_are_those_of_one_cumulative_sum(vocabulary, spread):
    """Of large vocabularies only blocks are summed: numpy's plain sum picks the same tokens."""
    rows = 60
    logits = _logits(rows, vocabulary, seed=vocabulary) * spread
    logits[:, ::3] = -math.inf
    u = uniforms(request_keys(3, 1, range(rows)), 1)[:, 0]
    u[:8], u[8:16] = 2.0**-41, 1 - 2.0**-41
    got, _ = Sampler(SamplingParams(1), CPU)(logits, u)
    cdf = torch.softmax(logits, 1).numpy().cumsum(1, dtype="float64")
    for row in range(rows):
        assert got[row] == np.searchsorted(cdf[row], u[row].item() * cdf[row, -1], side="right")
        assert logits[row, got[row]] > -math.inf


@pytest.mark.parametrize("vocabulary", [97, 4096])
def test_a_uniform_on_a_boundary_skips_tokens_without_probability(vocabulary):
    """Tokens 3 and 70 have 1/2 each; with 4,096 tokens the boundary is also one of blocks."""
    logits = torch.full((3, vocabulary), -math.inf)
    logits[:, [3, 70]] = 0.0
    u = torch.tensor([0.5 - 2**-41, 0.5, 0.5 + 2**-41], dtype=torch.float64)
    tokens, _ = Sampler(SamplingParams(1), CPU)(logits, u)
    assert tokens.tolist() == [3, 70, 70]


def _support(row: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """Second implementation in plain Python: sort, cut at k, then at mass p."""
    scaled = [x / temperature for x in row]
    order = sorted(range(len(row)), key=lambda i: -scaled[i])
    if top_k:
        order = order[:top_k]
    total = sum(math.exp(scaled[i]) for i in order)
    kept, mass = set(), 0.0
    for i in order:
        if mass >= top_p:
            break
        kept.add(i)
        mass += math.exp(scaled[i]) / total
    return kept


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
def test_filters_keep_the_support_of_a_second_implementation(temperature, top_k, top_p):
    logits = _logits()
    params = SamplingParams(1, temperature=temperature, top_k=top_k, top_p=top_p)
    kept = Sampler(params, CPU).filtered(logits) > -math.inf
    for row in range(3):
        want = _support(logits[row].tolist(), temperature, top_k, top_p)
        assert set(kept[row].nonzero()[:, 0].tolist()) == want


def test_logprobs_are_renormalised_over_the_support():
    logits = _logits()
    u = uniforms(request_keys(0, 0, range(3)), 1)[:, 0]
    tokens, logprobs = Sampler(SamplingParams(1, top_k=4), CPU)(logits, u)
    for row in range(3):
        top = logits[row].double().topk(4)
        want = math.log(math.exp(logits[row, tokens[row]].item()) / top.values.exp().sum().item())
        assert logprobs[row].item() == pytest.approx(want, abs=1e-5)


def test_suppressed_ids_leave_the_distribution_before_top_k():
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    z = Sampler(SamplingParams(1, top_k=2, suppress_ids=(0,)), CPU).filtered(logits)
    assert z.tolist() == [[-math.inf, 4.0, 3.0, -math.inf]]


def test_greedy_takes_the_largest_logit_and_reports_its_logprob():
    logits = _logits()
    tokens, logprobs = Sampler(SamplingParams(1, greedy=True), CPU)(logits, torch.zeros(3))
    assert tokens.tolist() == logits.argmax(1).tolist()
    want = torch.log_softmax(logits.double(), 1).max(1).values.float()
    torch.testing.assert_close(logprobs, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("vocabulary", [5, 5000])
def test_nan_logits_give_a_legal_token_and_a_nan_logprob(vocabulary):
    logits = torch.full((1, vocabulary), math.nan)
    tokens, logprobs = Sampler(SamplingParams(1), CPU)(logits, torch.tensor([0.5]).double())
    assert 0 <= tokens.item() < vocabulary
    assert math.isnan(logprobs.item())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_bad_settings_are_named(settings, name):
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{"max_new_tokens": 4, **settings})
