"""`Generator.generate` beside transformers' own."""

import inspect
import logging

import pytest
import torch
import transformers as tf

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import Generator
from rlhf_app.hybrid_engine import generator as generator_module
from rlhf_app.hybrid_engine.hf_arguments import read_request

IDS = torch.tensor([[0, 0, 7, 8], [5, 9, 11, 13], [0, 21, 22, 23]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


@pytest.fixture
def native_calls(monkeypatch):
    """Names of the ways taken, in order."""
    taken = []
    rollout = Generator.rollout

    def spy(self, *args, **kwargs):
        taken.append("engine")
        return rollout(self, *args, **kwargs)

    monkeypatch.setattr(Generator, "rollout", spy)
    return taken


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 9},
        {"max_new_tokens": 9, "do_sample": False, "temperature": 0.3, "top_k": 2},
        {"max_length": 12},
        {"max_new_tokens": 9, "eos_token_id": [40, 41, 42, 43, 44, 45, 46, 47]},
        {"max_new_tokens": 9, "eos_token_id": list(range(30, 60)), "pad_token_id": 1},
        {"max_new_tokens": 9, "suppress_tokens": list(range(50, 97))},
        {"generation_config": tf.GenerationConfig(max_new_tokens=9, eos_token_id=33)},
        {"max_new_tokens": 5, "repetition_penalty": 1.0, "num_beams": 1, "use_cache": True},
        {"max_new_tokens": 5, "logits_processor": tf.LogitsProcessorList()},
    ],
    ids=str,
)
def test_ids_equal_transformers(arguments, build, native_calls):
    model = build("llama")
    got = Generator(model).generate(IDS, MASK, **arguments)
    assert native_calls == ["engine"]
    want = model.generate(IDS, attention_mask=MASK, **arguments)
    assert got.dtype == want.dtype
    assert got.tolist() == want.tolist()


def test_missing_mask_is_found_from_the_pad_id(build):
    model = build("llama")
    want = model.generate(IDS, max_new_tokens=6)
    assert Generator(model).generate(IDS, max_new_tokens=6).tolist() == want.tolist()
    assert want.tolist() == model.generate(IDS, attention_mask=MASK, max_new_tokens=6).tolist()
    # A pad id that is also an end-of-text id says nothing about padding.
    kept = Generator(model).generate(IDS, max_new_tokens=6, pad_token_id=0, eos_token_id=0)
    assert kept.tolist() == model.generate(
        IDS, attention_mask=torch.ones_like(MASK), max_new_tokens=6, eos_token_id=0
    ).tolist()  # fmt: skip


def test_sampling_follows_torch_manual_seed_and_returns_logprobs(build):
    model = build("llama")
    generator = Generator(model)

    def run():
        return generator.generate(
            IDS, MASK, max_new_tokens=6, do_sample=True, top_k=5, temperature=0.8,
            num_return_sequences=2, return_dict_in_generate=True, eos_token_id=None,
        )  # fmt: skip

    torch.manual_seed(3)
    first = run()
    second = run()
    torch.manual_seed(3)
    again = run()
    assert torch.equal(first.sequences, again.sequences)
    assert not torch.equal(first.sequences, second.sequences)
    assert not torch.equal(first.sequences[0], first.sequences[1])
    assert first.sequences[:, :4].tolist() == IDS.repeat_interleave(2, 0).tolist()
    row = first.sequences[2]  # the prompt without padding
    logits = model(row[None]).logits[0, 3:-1] / 0.8
    least = logits.topk(5).values[:, -1:]
    logprobs = logits.masked_fill(logits < least, -torch.inf).log_softmax(-1)
    want = logprobs[torch.arange(6), row[4:]]
    torch.testing.assert_close(first.logprobs[2], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"min_new_tokens": 3}, "min_new_tokens"),
        ({"bad_words_ids": [[5]]}, "bad_words_ids"),
        ({"do_sample": True, "min_p": 0.2}, "min_p"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"use_cache": False}, "use_cache"),
        ({"logits_processor": [tf.MinLengthLogitsProcessor(3, 2)]}, "logits_processor"),
        ({"position_ids": torch.arange(4).expand(3, 4)}, "position_ids"),
    ],
)
def test_other_arguments_go_to_transformers_with_one_warning(
    arguments, named, build, native_calls, caplog
):
    model = build("llama")
    generator = Generator(model)
    if "logits_processor" in arguments:
        arguments = {"logits_processor": tf.LogitsProcessorList(arguments["logits_processor"])}
    torch.manual_seed(0)
    with caplog.at_level(logging.WARNING, logger=generator_module.__name__):
        got = generator.generate(IDS, MASK, max_new_tokens=6, **arguments)
        generator.generate(IDS, MASK, max_new_tokens=6, **arguments)
    warned = [r.getMessage() for r in caplog.records if r.name == generator_module.__name__]
    assert len(warned) == 1
    assert named in warned[0]
    assert native_calls == []
    torch.manual_seed(0)
    want = model.generate(IDS, attention_mask=MASK, max_new_tokens=6, **arguments)
    ids, expected = (x if torch.is_tensor(x) else x.sequences for x in (got, want))
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("mask", "arguments"),
    [(MASK.flip(1), {"max_new_tokens": 4}), (MASK, {})],
    ids=["right padding", "default length"],
)
def test_calls_the_engine_does_not_define_go_to_transformers(mask, arguments, build, native_calls):
    model = build("llama")
    got = Generator(model).generate(IDS, mask, **arguments)
    assert native_calls == []
    assert got.tolist() == model.generate(IDS, attention_mask=mask, **arguments).tolist()


def test_a_disabled_engine_generates_natively_without_a_warning(build, native_calls, caplog):
    model = build("llama")
    model.train()
    generator = Generator(model, HybridEngineSettings(enabled=False))
    with caplog.at_level(logging.WARNING, logger=generator_module.__name__):
        generator.generate(IDS, MASK, max_new_tokens=4)
    assert native_calls == []
    assert not [r for r in caplog.records if r.name == generator_module.__name__]
    assert model.training


def test_a_row_without_tokens_is_refused(build):
    mask = MASK.clone()
    mask[1] = 0
    with pytest.raises(ConfigError, match="row 1"):
        Generator(build("llama")).generate(IDS, mask, max_new_tokens=4)


# Fields that the engine implements (compared with transformers above and below) or that say
# nothing about the answer of a decoder-only model.
IMPLEMENTED = {
    "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "eos_token_id",
    "pad_token_id", "bos_token_id", "suppress_tokens", "num_return_sequences",
    "return_dict_in_generate", "transformers_version", "decoder_start_token_id",
}  # fmt: skip
# transformers reads these only when it samples.
SAMPLING = {"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
# transformers checks the values of these.
VALUES = {
    "use_cache": [False], "assistant_ensemble_weight": [0.5], "cache_implementation": ["static"],
    "compile_config": [tf.CompileConfig()], "early_stopping": [True, "never"],
    "watermarking_config": [tf.WatermarkingConfig()],
}  # fmt: skip
FIELDS = sorted(name for name in vars(tf.GenerationConfig()) if not name.startswith("_"))
CALL = sorted(
    set(inspect.signature(tf.GenerationMixin.generate).parameters)
    - {"self", "inputs", "generation_config", "kwargs"}
)


def _reasons(model, config, **arguments):
    return read_request(model, IDS, MASK, {"generation_config": config, **arguments}).reasons


@pytest.fixture(scope="module")
def llama(build):
    return build("llama")


@pytest.mark.parametrize("field", [name for name in FIELDS if name not in IMPLEMENTED])
def test_every_other_field_of_the_generation_config_is_a_reason(field, llama):
    for value in VALUES.get(field, [3, 0.25, [[5]]]):
        config = tf.GenerationConfig(max_new_tokens=4, do_sample=field in SAMPLING)
        setattr(config, field, value)
        assert _reasons(llama, config) == [field]


@pytest.mark.parametrize(
    "field", ["forced_bos_token_id", "forced_eos_token_id", "max_time", "guidance_scale"]
)
def test_zero_is_a_value(field, llama):
    config = tf.GenerationConfig(max_new_tokens=4)
    setattr(config, field, 0)
    assert _reasons(llama, config) == [field]


@pytest.mark.parametrize("field", ["forced_eos_token_id", "begin_suppress_tokens", "max_time"])
def test_a_value_of_zero_goes_to_transformers(field, build, native_calls):
    """Token 0 forced, or forbidden first; no time at all: all change the answer."""
    model = build("llama")
    value = [model.generate(IDS, attention_mask=MASK, max_new_tokens=1)[0, -1].item()]
    value = value if field == "begin_suppress_tokens" else 0
    arguments = {"max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 1, field: value}
    got = Generator(model).generate(IDS, MASK, **arguments)
    assert native_calls == []
    assert got.tolist() == model.generate(IDS, attention_mask=MASK, **arguments).tolist()
    plain = model.generate(IDS, attention_mask=MASK, **{**arguments, field: None})
    assert got.tolist() != plain.tolist()


@pytest.mark.parametrize(
    "off",
    [
        {"min_length": 0}, {"min_new_tokens": 0}, {"no_repeat_ngram_size": 0}, {"num_beams": 1},
        {"repetition_penalty": 1.0}, {"remove_invalid_values": False}, {"min_p": None},
        {"output_scores": False}, {"use_cache": True}, {"diversity_penalty": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_switches_that_are_off_are_no_reason(off, llama):
    assert _reasons(llama, tf.GenerationConfig(max_new_tokens=4), **off) == []


@pytest.mark.parametrize("name", CALL)
def test_every_argument_of_generate_is_a_reason(name, llama):
    empty_but_there = type("Streamer", (list,), {})()
    for value in (object(), empty_but_there):
        if value == [] and name in ("logits_processor", "stopping_criteria"):
            continue
        config = tf.GenerationConfig(max_new_tokens=4)
        assert _reasons(llama, config, **{name: value}) == [name]


def test_the_models_own_generation_config_counts(build, native_calls):
    model = build("llama")
    model.generation_config = tf.GenerationConfig(repetition_penalty=1.7, pad_token_id=0)
    got = Generator(model).generate(IDS, MASK, max_new_tokens=9)
    assert native_calls == []
    assert got.tolist() == model.generate(IDS, attention_mask=MASK, max_new_tokens=9).tolist()


def test_sampling_keeps_transformers_default_of_fifty_tokens(build):
    model = build("llama")
    generator = Generator(model)
    logits = model(IDS[1:2]).logits[0, -1]
    best = set(logits.topk(50).indices.tolist())
    arguments = {"max_new_tokens": 1, "do_sample": True, "temperature": 50.0}
    drawn = set()
    for seed in range(4):
        torch.manual_seed(seed)
        out = generator.generate(IDS[1:2], num_return_sequences=200, **arguments)
        drawn |= set(out[:, -1].tolist())
    assert drawn == best
    torch.manual_seed(0)
    out = generator.generate(IDS[1:2], num_return_sequences=400, top_k=0, **arguments)
    assert not set(out[:, -1].tolist()) <= best


def test_several_greedy_answers_are_transformers_own_error(build):
    with pytest.raises(ValueError, match="num_return_sequences"):
        Generator(build("llama")).generate(IDS, MASK, max_new_tokens=4, num_return_sequences=2)


def test_a_mask_of_another_shape_goes_to_transformers(llama):
    for mask in (MASK[:, :3], MASK[:, None, None].expand(3, 1, 4, 4)):
        config = tf.GenerationConfig(max_new_tokens=4)
        reasons = read_request(llama, IDS, mask, {"generation_config": config}).reasons
        assert reasons == ["an attention_mask of another shape than input_ids"]
