"""What a rollout is asked for is checked before anything runs."""

import random
import time

import numpy as np
import pytest
import torch

from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator, SamplingParams
from rlhf_app.hybrid_engine.request_checks import check_prompts

VOCAB = 97


@pytest.fixture(scope="module")
def generator(build):
    return Generator(build("llama"))


@pytest.mark.parametrize(
    ("prompts", "named"),
    [
        ([5], "prompt 0 is 5: give a list"),
        ([[3], ["ab"]], "prompt 1 is ['ab']: give a list"),
        (["ab"], "prompt 0 is 'ab': give a list"),
        ([b"ab"], "prompt 0 is b'ab': give a list"),
        ([[5, None]], "prompt 0 is [5, None]: give a list"),
        ([[[5, 6]]], "prompt 0 is [[5, 6]]: give a list"),
        ([[5.0]], "prompt 0 is [5.0]: give a list"),
        ([[2**70]], "prompt 0 is [1180591620717411303424]: give a list"),
        ([torch.tensor([[5]])], "prompt 0 is tensor([[5]]): give a list"),
        ([torch.tensor([5.0])], "prompt 0 is tensor([5.]): give a list"),
        ([torch.tensor(5)], "prompt 0 is tensor(5): give a list"),
        (torch.tensor([[5, 6], [7, 8]]), "prompts is a Tensor: give a list"),
        (np.array([[5, 6]]), "prompts is a ndarray: give a list"),
        (5, "prompts is a int: give a list"),
        ("text", "prompts is a str: give a list"),
        ([[5], [6, VOCAB]], f"prompt 1 holds id {VOCAB}: the model knows 0 to {VOCAB - 1}"),
        ([[5, -1]], "prompt 0 holds id -1"),
        ([[5], []], "prompt 1 is empty"),
    ],
    ids=str,
)
def test_what_is_not_lists_of_ids_is_named(prompts, named, generator):
    with pytest.raises(ConfigError) as error:
        generator.rollout(prompts, SamplingParams(2))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "prompts",
    [
        [(5, 6), (VOCAB - 1,)],
        ((5, 6), (VOCAB - 1,)),
        [torch.tensor([5, 6]), torch.tensor([VOCAB - 1])],
        [np.array([5, 6], dtype=np.int32), np.array([VOCAB - 1])],
        [[np.int64(5), 6], [VOCAB - 1]],
    ],
    ids=["tuples", "tuple of tuples", "tensors", "arrays", "numbers of numpy"],
)
def test_other_rows_of_ids_are_taken(prompts, generator):
    params = SamplingParams(4, greedy=True)
    want = generator.rollout([[5, 6], [VOCAB - 1]], params).tokens
    assert generator.rollout(prompts, params).tokens == want


def test_generate_names_an_id_beyond_the_vocabulary(build):
    model = build("llama")
    ids = torch.tensor([[5, 500]])
    with pytest.raises(IndexError):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(ConfigError, match="prompt 0 holds id 500"):
        Generator(model).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)


def test_many_tokens_are_checked_in_no_time():
    draw = random.Random(0)
    prompts = [[draw.randrange(50_000) for _ in range(256)] for _ in range(1024)]
    seconds = []
    for _ in range(5):
        start = time.process_time()
        check_prompts(prompts, 50_000)
        seconds.append(time.process_time() - start)
    # Some 6 ms when nothing else runs. The bound is for a mistake of another order.
    assert min(seconds) < 0.2
    prompts[700][13] = 50_000
    with pytest.raises(ConfigError, match="prompt 700 holds id 50000"):
        check_prompts(prompts, 50_000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 2.5), ("max_new_tokens", "8"), ("max_new_tokens", True),
        ("max_new_tokens", None), ("top_k", 1.0), ("top_k", None), ("temperature", None),
        ("temperature", "1"), ("temperature", torch.tensor(1.0)), ("top_p", None),
        ("top_p", "0.9"), ("stop_ids", [5]), ("stop_ids", 5), ("stop_ids", (5, "a")),
        ("stop_ids", None), ("suppress_ids", {5}), ("suppress_ids", (1.0,)), ("seed", 0.5),
        ("suppress_ids", (-1, 4)), ("step", None), ("temperature", float("nan")),
    ],
    ids=str,
)  # fmt: skip
def test_params_name_the_argument_that_is_wrong(field, value):
    with pytest.raises(ConfigError, match=rf"^{field} "):
        SamplingParams(**{"max_new_tokens": 4, field: value})


def test_numbers_of_other_kinds_are_numbers():
    params = SamplingParams(
        np.int64(4), temperature=1, top_p=np.float32(0.5), stop_ids=(np.int64(3),), seed=2**70
    )
    assert hash(params) == hash(SamplingParams(4, 1.0, top_p=0.5, stop_ids=(3,), seed=2**70))


def test_a_rollout_suppresses_only_what_there_is(generator):
    generator.rollout([[5]], SamplingParams(2, suppress_ids=(VOCAB - 1,)))
    with pytest.raises(ConfigError, match=rf"suppress_ids holds {VOCAB}: .* 0 to {VOCAB - 1}"):
        generator.rollout([[5]], SamplingParams(2, suppress_ids=(3, VOCAB)))
    # A stop id that never comes is as good as none.
    generator.rollout([[5]], SamplingParams(2, stop_ids=(VOCAB + 5, -1)))
