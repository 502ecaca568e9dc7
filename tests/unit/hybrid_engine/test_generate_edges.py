"""Arguments at the edge of sense, where transformers' own behaviour is what counts."""

import pytest
import torch
import transformers as tf
from torch import nn

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator

IDS = torch.tensor([[0, 0, 7, 8], [5, 9, 11, 13], [0, 21, 22, 23]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
LAST = 96


@pytest.fixture
def engine_calls(monkeypatch):
    """One entry per call that the engine served."""
    calls = []
    rollout = Generator.rollout
    monkeypatch.setattr(
        Generator, "rollout", lambda *args, **more: calls.append(1) or rollout(*args, **more)
    )
    return calls


@pytest.fixture
def likes_the_last(build):
    """A model whose best token is nearly always the vocabulary's last."""
    model = build("llama")
    model.lm_head = nn.Linear(32, LAST + 1)
    nn.init.zeros_(model.lm_head.bias)
    model.lm_head.bias.data[LAST] = 50.0
    return model


@pytest.mark.parametrize("ids", [[-1], [1000], [-1, 1000, LAST], [LAST, 4], []], ids=str)
def test_only_ids_of_the_vocabulary_are_suppressed(ids, likes_the_last, engine_calls):
    more = {"max_new_tokens": 4, "eos_token_id": None, "suppress_tokens": ids}
    want = likes_the_last.generate(IDS, attention_mask=MASK, **more)
    assert bool((want[:, -1] == LAST).all()) == (LAST not in ids)
    got = Generator(likes_the_last).generate(IDS, MASK, **more)
    assert got.tolist() == want.tolist()
    assert engine_calls


@pytest.mark.parametrize(
    "broken", ["nan", "inf", "temperature", "all suppressed", "all suppressed, native"]
)
@pytest.mark.parametrize("do_sample", [True, False])
def test_no_distribution_is_an_error_where_it_is_one_for_transformers(broken, do_sample, build):
    model = build("llama")
    more = {"max_new_tokens": 3, "do_sample": do_sample, "eos_token_id": None}
    if broken == "temperature":
        more |= {"temperature": 1e-40, "top_k": 0}
    elif broken.startswith("all"):
        more["suppress_tokens"] = list(range(LAST + 1))
        if broken.endswith("native"):
            model = build("gpt-oss")
    else:
        model.lm_head.weight.data[5] = float(broken)
    if do_sample:
        with pytest.raises(RuntimeError, match="probability tensor"):
            model.generate(IDS, attention_mask=MASK, **more)
        with pytest.raises(RuntimeError, match="generate: no distribution to sample from in row 0"):
            Generator(model).generate(IDS, MASK, **more)
    else:
        got = Generator(model).generate(IDS, MASK, **more)
        assert got.tolist() == model.generate(IDS, attention_mask=MASK, **more).tolist()


@pytest.mark.parametrize(
    ("mask", "engine"),
    [
        (MASK.bool(), True), (MASK.float(), True), (MASK.to(torch.uint8), True),
        (MASK * 2, False), (MASK * 255, False), (MASK * 0.5, False), (-MASK, False),
        ((1 - MASK) * -1e9, False),
    ],
    ids=["bool", "float", "uint8", "2", "255", "half", "-1", "additive"],
)  # fmt: skip
def test_masks_mean_what_they_mean_to_transformers(mask, engine, build, engine_calls, warnings_of):
    """It takes every value but 0 for on, and adds the values up to positions."""
    model = build("llama")
    want = model.generate(IDS, attention_mask=mask, max_new_tokens=6)
    with warnings_of() as warned:
        got = Generator(model).generate(IDS, mask, max_new_tokens=6)
    assert got.tolist() == want.tolist()
    assert bool(engine_calls) == engine
    assert bool(warned) != engine
    assert engine or "attention_mask of other values than 0 and 1" in warned[0]


@pytest.mark.parametrize(
    ("more", "engine"),
    [
        ({"temperature": None, "top_k": 1}, True),
        ({"top_p": None, "top_k": 1}, True),
        ({"top_p": 1.5, "top_k": 1}, True),
        ({"top_p": float("nan"), "top_k": 1}, True),
        ({"eos_token_id": torch.tensor([20, 69]), "top_k": 1}, True),
        (
            {"eos_token_id": torch.tensor(20), "suppress_tokens": torch.tensor([3]), "top_k": 1},
            True,
        ),
        ({"top_p": 0.0}, False),
        ({"temperature": float("inf"), "top_k": 1}, False),
    ],
    ids=str,
)
def test_settings_that_transformers_takes_are_taken(more, engine, build, engine_calls):
    model = build("llama")
    torch.manual_seed(0)
    want = model.generate(IDS, attention_mask=MASK, max_new_tokens=5, do_sample=True, **more)
    torch.manual_seed(0)
    got = Generator(model).generate(IDS, MASK, max_new_tokens=5, do_sample=True, **more)
    assert got.tolist() == want.tolist()
    assert bool(engine_calls) == engine


def test_no_temperature_is_a_temperature_of_one(build):
    generator = Generator(build("llama"))
    drawn = []
    for temperature in (None, 1.0):
        torch.manual_seed(1)
        out = generator.generate(
            IDS, MASK, max_new_tokens=8, do_sample=True, temperature=temperature, top_k=0
        )
        drawn.append(out.tolist())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0}, {"temperature": -1.0}, {"temperature": "1"},
        {"temperature": float("nan")}, {"top_k": -1}, {"top_k": 1.5}, {"top_p": -0.5},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_transformers_refuses_are_refused_by_name(more, build):
    model = build("llama")
    with pytest.raises(ValueError, match="has to be"):
        model.generate(IDS, attention_mask=MASK, max_new_tokens=2, do_sample=True, **more)
    with pytest.raises(ConfigError, match=f"^{next(iter(more))} is"):
        Generator(model).generate(IDS, MASK, max_new_tokens=2, do_sample=True, **more)


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({"max_new_tokens": 6}, 10),
        ({"max_length": 10}, 10),
        ({}, 24),  # transformers' 20 tokens
        ({"generation_config": tf.GenerationConfig(max_length=9)}, 9),
        ({"max_new_tokens": 6, "model's max_length": 40}, 10),
        ({"model's max_length": 12}, 12),
    ],
    ids=str,
)
@pytest.mark.parametrize("native", [{}, {"num_beams": 2}, {"repetition_penalty": 1.5}], ids=str)
def test_max_out_tokens_bounds_whoever_generates(more, rows, native, build):
    model = build("llama")
    model.generation_config = tf.GenerationConfig(pad_token_id=0)
    more = dict(more)
    model.generation_config.max_length = more.pop("model's max_length", None)
    want = model.generate(IDS, attention_mask=MASK, **native, **more)
    assert want.shape[1] == rows
    fits = Generator(model, HybridEngineSettings(max_out_tokens=rows))
    assert fits.generate(IDS, MASK, **native, **more).tolist() == want.tolist()
    short = Generator(model, HybridEngineSettings(max_out_tokens=rows - 1))
    with pytest.raises(ConfigError, match=r"exceed hybrid_engine.max_out_tokens"):
        short.generate(IDS, MASK, **native, **more)


def test_padding_does_not_count_towards_max_out_tokens(build):
    model = build("llama")
    generator = Generator(model, HybridEngineSettings(max_out_tokens=8))
    ids, mask = IDS[[0, 2]], MASK[[0, 2]]
    for more in ({}, {"num_beams": 2}):
        assert generator.generate(ids, mask, max_new_tokens=5, **more).shape[1] <= 9
