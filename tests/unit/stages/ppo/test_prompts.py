"""Prompt order and its division over ranks."""

from collections import Counter

import pytest
import torch

from rlhf_app.config.schema import PPOConfig
from rlhf_app.errors import ConfigError
from rlhf_app.training.distributed import Dist
from stages.ppo.prompts import PromptStream, one_pass, rank_uids, update_prompts


def test_each_epoch_holds_every_prompt_once_in_another_order():
    stream = PromptStream(list("abcdefgh"), seed=3)
    epochs = [[stream[epoch * 8 + i] for i in range(8)] for epoch in range(3)]
    assert all(sorted(epoch) == list("abcdefgh") for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_positions_can_be_read_in_any_order():
    one, other = PromptStream(list("abcd"), seed=1), PromptStream(list("abcd"), seed=1)
    forwards = [one[i] for i in range(12)]
    assert [other[i] for i in reversed(range(12))] == forwards[::-1]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_mini_batches_hold_the_same_rows_for_any_number_of_ranks(world_size):
    ppo = PPOConfig(rollout_batch_size=24, mini_batches=3, micro_batch_size=1)
    per_rank = [
        rank_uids(ppo, Dist(rank, rank, world_size, torch.device("cpu")))
        for rank in range(world_size)
    ]
    share = 8 // world_size
    for mini_batch in range(3):
        mine = slice(mini_batch * share, (mini_batch + 1) * share)
        rows = [uid for uids in per_rank for uid in uids[mine]]
        assert sorted(rows) == list(range(mini_batch * 8, mini_batch * 8 + 8))


def test_under_a_token_budget_the_micro_batch_size_need_not_divide():
    ppo = PPOConfig(rollout_batch_size=12, micro_batch_size=8, micro_batch_tokens=100)
    assert rank_uids(ppo, Dist(1, 1, 2, torch.device("cpu"))) == [6, 7, 8, 9, 10, 11]
    with pytest.raises(ConfigError, match=r"divisible by 5 \(ppo.mini_batches x 5 processes\)"):
        rank_uids(ppo, Dist(0, 0, 5, torch.device("cpu")))


@pytest.mark.parametrize(("batch", "micro", "ranks"), [(8, 1, 3), (9, 1, 2), (8, 3, 1), (4, 2, 4)])
def test_rows_that_no_rank_would_answer_are_refused_on_every_rank(batch, micro, ranks):
    ppo = PPOConfig(rollout_batch_size=batch, mini_batches=1, micro_batch_size=micro)
    for rank in range(ranks):
        with pytest.raises(ConfigError, match=f"ppo.rollout_batch_size = {batch}: is not"):
            rank_uids(ppo, Dist(rank, rank, ranks, torch.device("cpu")))


@pytest.mark.parametrize("world_size", [1, 2])
def test_answers_of_a_prompt_are_neighbours_and_prompts_are_used_equally_often(world_size):
    """8 prompts, 4 a time with 3 answers each: two updates are a pass."""
    ppo = PPOConfig(rollout_batch_size=12, answers_per_prompt=3, micro_batch_size=1, mini_batches=2)
    assert one_pass(8, ppo) == 2
    assert one_pass(9, ppo) == 3
    used = Counter()
    for update in range(1, 5):
        answered = {}
        for rank in range(world_size):
            uids = rank_uids(ppo, Dist(rank, rank, world_size, torch.device("cpu")))
            # As each rank has its own stream.
            prompts = update_prompts(PromptStream(list("abcdefgh"), seed=3), update, uids, ppo)
            answered |= dict(zip(uids, prompts, strict=True))
        assert sorted(answered) == list(range(12))
        for first in (0, 3, 6, 9):
            assert answered[first] == answered[first + 1] == answered[first + 2]
        assert len({answered[first] for first in (0, 3, 6, 9)}) == 4
        used.update(answered.values())
    assert set(used.values()) == {6}
