"""`rlhf bench` as users run it, on a shape that a CPU runs in seconds."""

import json

import pytest
import torch

from rlhf_app.cli import run

SHORT = ("--prompt-tokens", "16", "--answer-tokens", "24", "--json", "-")
# The tiny shape in fp32: 2 layers of 64 x (64 + 32 + 32 + 64) + 3 x 64 x 192 weights in matrices,
# two norms each, a final norm, and 512 x 64 tied embedding rows. 2 x 2 heads of 16 are stored.
LAYER = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 192
HEAD = 512 * 64
WEIGHT_BYTES = 4 * (2 * (LAYER + 2 * 64) + 64 + HEAD)
KV_BYTES = 4 * 2 * 2 * 2 * 16


def forward_flops(tokens: int, picked: int) -> int:
    attention = 2 * 4 * 64 * tokens * (tokens + 1) // 2
    return 2 * (tokens * 2 * LAYER + picked * HEAD) + attention


def report_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_generate(run_cli):
    arguments = ("--shape", "tiny", "--batch-sizes", "2,8", "--repeats", "2")
    report = report_of(run_cli("bench", "generate", *arguments, *SHORT))
    assert report["model"]["parameters"] == WEIGHT_BYTES // 4 == 131_392
    assert report["cost"]["weight_bytes"] == WEIGHT_BYTES
    assert report["cost"]["kv_bytes_per_token"] == KV_BYTES
    bandwidth, peak = report["device"]["bandwidth"], report["device"]["peak"]
    assert 1e8 < bandwidth < 1e13
    assert 1e8 < peak < 1e14
    assert [row["requests"] for row in report["rows"]] == [2, 8]
    for row, count in zip(report["rows"], (2, 8), strict=True):
        engine, rates = row["engine"], row["rates"]
        assert engine["generated_tokens"] == count * 24
        assert engine["decode_tokens"] == count * 23
        assert engine["decode_steps"] == 23
        assert len(engine["all_seconds"]) == 2
        assert engine["total_seconds"] in engine["all_seconds"]
        inside = engine["prefill_seconds"] + engine["decode_seconds"]
        assert 0.5 * engine["total_seconds"] < inside <= engine["total_seconds"]
        # Step t reads 16 + t tokens, t = 1 ... 23.
        kv = count * KV_BYTES * sum(range(17, 40)) / bandwidth
        gemm = 23 * max(WEIGHT_BYTES / bandwidth, 2 * count * (2 * LAYER + HEAD) / peak)
        prefill = count * forward_flops(16, 1) / peak
        fractions = {
            "decode_fraction": (kv + gemm) / engine["decode_seconds"],
            "fraction": (kv + gemm + prefill) / engine["total_seconds"],
            "tokens_per_second": count * 24 / engine["total_seconds"],
            "decode_tokens_per_second": count * 23 / engine["decode_seconds"],
            "limit_decode_tokens_per_second": count * 23 / (kv + gemm),
            "hf_tokens_per_second": count * 24 / row["hf"]["seconds"],
            "ratio_to_hf": row["hf"]["seconds"] / engine["total_seconds"],
            "slot_utilisation": 1.0,
        }
        assert {name: rates[name] for name in fractions} == pytest.approx(fractions)
        split = row["split"]
        assert split["steps"] == 4
        assert min(split["seconds"].values()) >= 0
        assert split["seconds"]["GEMM"] > 0
        assert row["error"] == ""


@pytest.mark.slow
def test_generate_with_varied_lengths(run_cli):
    report = report_of(
        run_cli(
            "bench",
            "generate",
            "--shape",
            "tiny",
            "--answer-lengths",
            "geometric:8",
            "--requests",
            "40",
            "--slots",
            "4,64",
            "--repeats",
            "1",
            *SHORT,
        )
    )
    few, many = report["rows"]
    tokens = few["engine"]["generated_tokens"]
    assert tokens == many["engine"]["generated_tokens"]
    assert 40 < tokens < 40 * 24
    for row in (few, many):
        engine = row["engine"]
        assert engine["decode_tokens"] == tokens - 40
        assert engine["decode_steps"] >= row["ideal_steps"]
        used = (tokens - 40) / (engine["decode_steps"] * row["slots"])
        ideal = (tokens - 40) / (row["ideal_steps"] * row["slots"])
        assert row["rates"]["slot_utilisation"] == pytest.approx(used)
        assert row["rates"]["ideal_slot_utilisation"] == pytest.approx(ideal)
        assert row["hf"] is None
        assert row["split"]["steps"] == 4
        floor = row["limit"]["kv_seconds"] + row["ideal_steps"] * (
            WEIGHT_BYTES / report["device"]["bandwidth"]
        )
        floor += 40 * forward_flops(16, 1) / report["device"]["peak"]
        fraction = floor / engine["total_seconds"]
        assert row["rates"]["floor_fraction"] == pytest.approx(fraction)
    # The same tokens are read whatever the slots.
    assert few["limit"]["kv_seconds"] == pytest.approx(many["limit"]["kv_seconds"])
    # With a slot for each the longest answer decides.
    assert many["ideal_steps"] <= 23


@pytest.mark.slow
def test_generate_of_a_model_on_disk(run_cli, tiny_lm, tmp_path):
    done = run_cli(
        "bench",
        "generate",
        "--model",
        str(tiny_lm),
        "--batch-sizes",
        "2",
        "--greedy",
        "--no-hf",
        "--no-profile",
        "--prompt-tokens",
        "8",
        "--answer-tokens",
        "8",
        "--repeats",
        "1",
        "--json",
        "found.json",
    )
    assert done.returncode == 0, done.stderr
    assert "fraction of the limit" in done.stdout
    report = json.loads((tmp_path / "found.json").read_text())
    assert report["model"]["name"] == str(tiny_lm)
    assert report["work"]["params"]["greedy"] is True
    assert report["rows"][0]["hf"] is None


@pytest.mark.slow
def test_ppo(run_cli):
    report = report_of(
        run_cli(
            "bench",
            "ppo",
            "--rollout-batch",
            "8",
            "--generation",
            "both",
            "--iterations",
            "2",
            *SHORT,
        )
    )
    bandwidth, peak = report["device"]["bandwidth"], report["device"]["peak"]
    scored, trunk = 8 * forward_flops(40, 24), 8 * forward_flops(40, 0)
    expected = {
        "prefill": 8 * forward_flops(16, 1) / peak,
        "old": scored / peak,
        "reference": scored / peak,
        "values": trunk / peak,
        "reward": trunk / peak,
        "actor_forward_backward": 3 * scored / peak,
        "critic_forward_backward": 3 * trunk / peak,
        # The critic's head has a weight for each of 64 states and a bias. fp32: 28 bytes each.
        "step": (131_392 + 131_392 + 65) * 28 / bandwidth,
    }
    found = {name: limit["seconds"] for name, limit in report["limits"].items()}
    decode = found.pop("decode")
    assert found == pytest.approx(expected)
    kv = 8 * KV_BYTES * sum(range(17, 40)) / bandwidth
    gemm = 23 * max(WEIGHT_BYTES / bandwidth, 2 * 8 * (2 * LAYER + HEAD) / peak)
    assert decode == pytest.approx(kv + gemm)
    assert report["limit_seconds"] == pytest.approx(decode + sum(expected.values()))
    engine, native = report["loops"]
    medians = []
    for loop in (engine, native):
        assert len(loop["seconds"]) == 2
        median = min(loop["seconds"])
        medians.append(median)
        assert sum(loop["phases"].values()) <= median * 1.001
        assert loop["tokens"] == 8 * 24
        assert loop["first_ratio"] == 1.0
        assert loop["rates"]["fraction"] == pytest.approx(report["limit_seconds"] / median)
        assert loop["rates"]["sequences_per_second"] == pytest.approx(8 / median)
        for name in expected.keys() & loop["phases"].keys():
            fraction = found[name] / loop["phases"][name]
            assert loop["phase_rates"][name]["fraction"] == pytest.approx(fraction)
    assert {"prefill", "decode", "old", "step"} <= engine["phases"].keys()
    assert "rollout" in native["phases"]
    assert native["form"] == "native"
    assert engine["form"] != "native"
    assert report["speedup_over_native"] == pytest.approx(medians[1] / medians[0])


@pytest.mark.slow
def test_ppo_with_adapters_varied_lengths_and_mini_batches(run_cli):
    report = report_of(
        run_cli(
            "bench",
            "ppo",
            "--rollout-batch",
            "8",
            "--lora-rank",
            "4",
            "--answer-lengths",
            "geometric:6",
            "--max-slots",
            "3",
            "--gradient-checkpointing",
            "--set",
            "ppo.mini_batches=2",
            *SHORT,
        )
    )
    (loop,) = report["loops"]
    actor = report["models"]["actor"]
    assert actor["parameters"] - actor["trained"] == 131_392
    assert loop["slots"] == 3
    assert 8 <= loop["tokens"] < 8 * 24
    assert report["limit_seconds_without_old"] == report["limit_seconds"]
    # GEMMs of frozen weights are not repeated for their gradients.
    old, training = (report["limits"][name]["flops"] for name in ("old", "actor_forward_backward"))
    assert 2 * old < training < 3 * old


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--shape", "opt-1b"], "--shape opt-1b: unknown shape; known are opt-125m"),
        (["generate", "--shape", "tiny", "--model", "m"], "are both given"),
        (["generate", "--batch-sizes", "8,0"], "--batch-sizes 8,0: give whole numbers from 1"),
        (["generate", "--batch-sizes", "many"], "--batch-sizes many"),
        (["generate", "--slots", "4"], "--slots belongs to --answer-lengths geometric"),
        (["generate", "--answer-lengths", "geometric:9", "--batch-sizes", "4"], "give --slots"),
        (["generate", "--repeats", "0"], "--repeats 0: give at least 1"),
        (["generate", "--prompt-tokens", "0"], "--prompt-tokens 0: give at least 1"),
        (
            ["generate", "--shape", "tiny", "--prompt-tokens", "900", "--answer-tokens", "200"],
            "exceed the 1024 positions of tiny",
        ),
        (["generate", "--model", "./absent"], "--model ./absent: no such directory"),
        (["ppo", "--shape", "opt-1b"], "--shape opt-1b: unknown shape"),
        (["ppo", "--generation", "fast"], "--generation fast: give one of engine, native, both"),
        (["ppo", "--rollout-batch", "0"], "ppo.rollout_batch_size = 0 (from --rollout-batch)"),
        (["ppo", "--rollout-batch", "9", "--set", "ppo.mini_batches=2"], "no multiple"),
        (["ppo", "--shape", "tiny", "--answer-tokens", "2000"], "1024 positions of tiny"),
        (["ppo", "--shape", "opt-125m", "--critic-shape", "tiny"], "--critic-shape tiny knows 512"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_input(capsys, arguments, message):
    assert run(["bench", *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("rlhf: error: ")
    assert message in error


def test_a_batch_that_does_not_fit_keeps_no_other_from_being_measured(capsys, monkeypatch):
    from rlhf_app.hybrid_engine import Generator

    rollout = Generator.rollout

    def small_memory(self, prompts, *arguments, **named):
        if len(prompts) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.50 GiB.")
        return rollout(self, prompts, *arguments, **named)

    monkeypatch.setattr(Generator, "rollout", small_memory)
    arguments = ["--shape", "tiny", "--batch-sizes", "2,5,3", "--no-hf", "--no-profile"]
    assert run(["bench", "generate", *arguments, "--repeats", "1", *SHORT]) == 1
    output = capsys.readouterr()
    rows = json.loads(output.out)["rows"]
    assert [bool(row["engine"]) for row in rows] == [True, False, True]
    message = "5 rows, engine: out of memory: CUDA out of memory. Tried to allocate 7.50 GiB."
    assert rows[1]["error"] == message
    assert rows[1]["rates"] == {}
    assert output.err.strip().splitlines()[-1] == f"rlhf: bench: {message}"


def test_other_errors_are_not_taken_for_too_little_memory(monkeypatch):
    from rlhf_app.hybrid_engine import Generator

    def broken(*_arguments, **_named):
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(Generator, "rollout", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        run(["bench", "generate", "--shape", "tiny", "--batch-sizes", "2", *SHORT])


def test_a_model_that_does_not_fit(capsys, monkeypatch):
    from rlhf_app.bench import random_models

    def full(*_arguments, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.71 GiB.")

    monkeypatch.setattr(random_models, "_fill", full)
    assert run(["bench", "generate", "--shape", "tiny", *SHORT]) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("rlhf: error: bench: tiny: out of memory")
    assert "6.71 GiB" in line
