"""A limit of its own for each answer: what is drawn does not depend on it, only how much."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams

MOST = 12
FREE = SamplingParams(MOST, seed=7, step=2)
STOPPING = SamplingParams(MOST, seed=7, step=2, stop_ids=(2, 11, 30))


@pytest.fixture
def limits(prompts):
    """1 to 12, every one of them, in no order."""
    return [1 + 7 * i % MOST for i in range(len(prompts))]


def _cut(answer: list[int], limit: int, stop_ids: tuple[int, ...]) -> tuple[list[int], bool]:
    """Second implementation: what a longer answer without stops becomes."""
    for index, token in enumerate(answer[:limit]):
        if token in stop_ids:
            return answer[: index + 1], True
    return answer[:limit], False


@pytest.mark.parametrize("enabled", [True, False], ids=["engine", "native"])
@pytest.mark.parametrize("slots", [None, 1, 5])
@pytest.mark.parametrize("params", [FREE, STOPPING], ids=["free", "stopping"])
def test_an_answer_is_cut_at_its_limit_or_stops_before(
    params, slots, enabled, build, prompts, limits
):
    model = build("llama")
    whole = Generator(model).rollout(prompts, FREE)
    assert {len(answer) for answer in whole.tokens} == {MOST}
    generator = Generator(model, HybridEngineSettings(enabled=enabled))
    got = generator.rollout(prompts, params, max_slots=slots, limits=limits)
    want = [_cut(a, n, params.stop_ids) for a, n in zip(whole.tokens, limits, strict=True)]
    assert got.tokens == [answer for answer, _ in want]
    assert got.stopped == [stopped for _, stopped in want]
    assert any(got.stopped) == (params is STOPPING)
    for mine, theirs in zip(got.logprobs, whole.logprobs, strict=True):
        torch.testing.assert_close(mine, theirs[: len(mine)], atol=1e-4, rtol=0)
    assert got.timings.generated_tokens == sum(map(len, got.tokens))


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_limits_go_with_their_prompts_in_any_order(kind, build, prompts, limits):
    generator = Generator(build("llama"))
    uids = [1000 + 7 * i for i in range(len(prompts))]
    want = generator.rollout(prompts, STOPPING, uids, limits=limits)
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)).tolist()
    got = generator.rollout(
        [prompts[i] for i in order],
        STOPPING,
        [uids[i] for i in order],
        max_slots=4,
        limits=kind([limits[i] for i in order]),
    )
    assert got.tokens == [want.tokens[i] for i in order]
    assert got.stopped == [want.stopped[i] for i in order]


def test_answers_of_one_token_need_no_decode_step(build, prompts):
    rollout = Generator(build("llama")).rollout(prompts, FREE, limits=[1] * len(prompts))
    assert {len(answer) for answer in rollout.tokens} == {1}
    assert rollout.timings.decode_steps == 0
    assert rollout.timings.slot_utilisation == 1.0


def test_equal_prompts_with_limits_of_their_own(build, prompts):
    """They share a prefill, and later ones join a row that is still running."""
    generator = Generator(build("llama"))
    repeated, limits = [prompts[1]] * 9, [3, 1, 12, 5, 2, 9, 1, 7, 4]
    alone = [generator.rollout([p], FREE, uids=[uid]) for uid, p in enumerate(repeated)]
    for slots in (None, 3):
        got = generator.rollout(repeated, FREE, max_slots=slots, limits=limits)
        assert got.tokens == [a.tokens[0][:n] for a, n in zip(alone, limits, strict=True)]


def test_a_row_is_as_long_as_its_prompt_and_its_limit(build):
    """The model has 64 positions: 60 + 4 and 20 + 30 fit, 60 + 30 would not."""
    generator = Generator(build("opt"))
    params = SamplingParams(30)
    got = generator.rollout([[5] * 60, [6] * 20], params, limits=[4, 30])
    assert [len(answer) for answer in got.tokens] == [4, 30]
    with pytest.raises(ConfigError, match=r"60 tokens and a limit of 5 exceed .*positions .64"):
        generator.rollout([[5] * 60, [6] * 20], params, limits=[5, 30])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([3], "1 limits for 2 prompts"),
        ([3, 0], r"limit 1 is 0: give a whole number from 1 to max_new_tokens \(4\)"),
        ([5, 1], "limit 0 is 5"),
        ([True, 1], "limit 0 is True"),
        ([2.0, 1], "limit 0 is 2.0"),
        ("34", "limits is a str"),
        (3, "limits is a int"),
    ],
)
def test_bad_limits_are_refused(limits, message, build):
    with pytest.raises(ConfigError, match=message):
        Generator(build("opt")).rollout([[5], [6]], SamplingParams(4), limits=limits)
