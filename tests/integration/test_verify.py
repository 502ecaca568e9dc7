"""`rlhf verify` as users run it: what it says of right and of broken engines."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from faults import plant

PATH = [
    "training forward", "generate", "training forward", "optimizer step", "generate",
    "training forward",
]  # fmt: skip


def ranks_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_all_is_well(rank):
    assert rank["problems"] == []
    assert [switch["name"] for switch in rank["switches"]] == PATH
    norms = [switch["logits_norm"] for switch in rank["switches"]]
    assert norms[0] == norms[2] != norms[5]
    assert norms[1] is norms[3] is norms[4] is None
    assert [greedy["different_rows"] for greedy in rank["greedy"]] == [0, 0]
    assert all(greedy["tokens"] == 40 * greedy["rows"] for greedy in rank["greedy"])
    for gap in rank["gaps"]:
        assert 0 < gap["mean"] <= gap["max"] < 1e-4  # fp32
        assert gap["mean_bound"] < 1e-4
    for gap, draws in zip(rank["gaps"], rank["draws"], strict=True):
        greedy, sampled = draws["greedy"], draws["sampled"]
        assert greedy["tokens"] == rank["greedy"][0]["tokens"]
        # Sampled twice, the second time with stop ids.
        assert greedy["tokens"] < sampled["tokens"] < 2 * greedy["tokens"]
        assert gap["tokens"] == greedy["tokens"] + sampled["tokens"]
        assert draws["ends"] == []
        assert sampled["misses"] + sampled["forbidden"] + greedy["forbidden"] == 0
    assert rank["logits_change"] > 0.01
    assert rank["breakdown"].startswith("E2E latency=")


@pytest.mark.slow
def test_the_built_in_model(run_cli):
    (rank,) = ranks_of(run_cli("verify", "--json"))
    check_all_is_well(rank)
    assert rank["model"].startswith("the built-in model (llama, 257,280 parameters), ZeRO 0")
    assert (rank["route"], rank["missing"]) == ("workspace", None)
    assert rank["weights"] == "20 parameters, all at their address"


@pytest.mark.slow
def test_the_table_of_a_trained_model(run_cli, shared_dir):
    """In bf16 greedy ties and the gap are judged by what bf16 rounds."""
    model = shared_dir / "models" / "stories260K"
    done = run_cli("verify", "--model", str(model), "--dtype", "bf16", "--lora-rank", "4")
    assert done.returncode == 0, done.stderr
    assert "ZeRO 1, bfloat16, 1 process on cpu, LoRA rank 4, unfused" in done.stdout
    for label in (
        "logits norm", "decode form", "greedy tokens 2 against Hugging Face",
        "log-probs 2 against training", "sampled tokens 2 against training",
        "greedy tokens 2 against training", "answer ends 2", "all at their address",
        "E2E latency=", "no mismatch",
    ):  # fmt: skip
        assert label in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--zero-stage", "3", "--processes", "2", "--lora-rank", "2"],
        ["--zero-stage", "3", "--set", "hybrid_engine.pin_parameters=false"],
        ["--zero-stage", "2", "--tp", "2"],
    ],
    ids=" ".join,
)
def test_several_ranks_and_zero_stages(flags, run_cli):
    ranks = ranks_of(run_cli("verify", "--json", *flags, timeout=240))
    assert len(ranks) == (1 if "--set" in flags else 2)
    for rank in ranks:
        check_all_is_well(rank)
        split = re.fullmatch(r"(\d+) of (\d+) parameters split .*", rank["weights"])
        if "3" in flags:
            assert split, rank["weights"]
            assert split[1] == split[2]
        else:
            assert split is None


@pytest.mark.slow
def test_tensor_parallelism_that_was_not_used_is_no_success(run_cli, tmp_path):
    """Three heads do not divide by two: the rollouts are right, but not those asked for."""
    import transformers as tf

    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=64,
    )  # fmt: skip
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "three")
    done = run_cli("verify", "--model", str(tmp_path / "three"), "--tp", "2", timeout=240)
    assert done.returncode == 1
    assert "2 processes were to share each rollout" in done.stderr.splitlines()[-1]
    assert "verify: warning: " in done.stdout + done.stderr
    assert "3 attention and 3 key-value heads" in done.stdout + done.stderr


@pytest.mark.slow
def test_a_model_outside_the_workspace_says_what_it_lacks(run_cli, tmp_path):
    import transformers as tf

    config = tf.MptConfig(
        vocab_size=97, d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64
    )
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "mpt")
    (rank,) = ranks_of(run_cli("verify", "--json", "--model", str(tmp_path / "mpt")))
    assert rank["problems"] == []
    assert rank["route"] == "native"
    assert rank["missing"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("positions one late", "generate 1: not Hugging Face's greedy tokens"),
        ("one layer's cache shifted", "generate 1: not Hugging Face's greedy tokens"),
        ("a weight moves", "generate 1: 1 of 20 parameters moved"),
        ("a weight is not put back", "the training forward changed"),
        ("always the same token", "generate 1: sampled tokens are not drawn from the policy"),
        ("decoding from old weights", "generate 2: not Hugging Face's greedy tokens"),
    ],
)
def test_complaint_dsc1_verify_finds_a_broken_engine(fault, reason, run_cli, tmp_path):
    """Exit 1, and one line that says what is wrong."""
    done = run_cli("verify", env=plant(fault, tmp_path / "fault"))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"rlhf: verify failed: {reason}")


@pytest.mark.slow
def test_weights_that_are_nan_are_named(run_cli, build_nan):
    done = run_cli("verify", "--json", "--model", str(build_nan))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "rlhf: verify failed: the training forward's logits are not finite"
    )
    (rank,) = json.loads(done.stdout)
    assert len(rank["problems"]) == 1


@pytest.fixture
def build_nan(tiny_lm, tmp_path):
    """A model that a diverged run left."""
    import torch
    import transformers as tf

    model = tf.AutoModelForCausalLM.from_pretrained(tiny_lm)
    with torch.no_grad():
        model.get_output_embeddings().weight[5] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    tf.AutoTokenizer.from_pretrained(tiny_lm).save_pretrained(tmp_path / "nan")
    return tmp_path / "nan"


@pytest.mark.slow
def test_complaint_dsc1_ppo_does_not_start_on_a_broken_engine(
    run_cli, run_stage, tiny_lm, tmp_path
):
    """Fails before the first update, naming the way out; with that, it trains."""
    rows = [
        {"prompt": f"{i:02d} ", "chosen": "yes" * (1 + i % 3), "rejected": "no"} for i in range(16)
    ]
    reward = run_stage(
        "reward", rows, tiny_lm, batch_size=4, micro_batch_size=4, data={"eval_fraction": 0.25}
    )
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["ppo", "--actor-model", str(tiny_lm), "--reward-model", str(reward["model"])]
    command += ["--data", str(data), "--data-split", "shared"]
    for setting in (
        "data.chat_format=plain", "data.eval_fraction=0.25", "ppo.updates=1",
        "ppo.rollout_batch_size=4", "ppo.micro_batch_size=4", "ppo.max_prompt_length=8",
        "ppo.max_response_length=6",
    ):  # fmt: skip
        command += ["--set", setting]
    fault = plant("positions one late", tmp_path / "fault")
    broken = run_cli(*command, "--output-dir", "broken", env=fault)
    assert broken.returncode == 1
    assert "RolloutMismatch: rollouts do not sample the policy that trains" in broken.stderr
    assert "hybrid_engine.enabled: false" in broken.stderr
    assert not (tmp_path / "broken" / "ppo" / "metrics.jsonl").exists()
    off = ["--set", "hybrid_engine.enabled=false", "--output-dir", "off"]
    assert run_cli(*command, *off, env=fault).returncode == 0
    right = run_cli(*command, "--output-dir", "right")
    assert right.returncode == 0, right.stderr
    results = {
        name: json.loads((tmp_path / name / "ppo" / "result.json").read_text())["rollout_checks"]
        for name in ("off", "right")
    }
    assert results["off"] == []
    (check,) = results["right"]
    assert 0 < check["mean"] <= check["max"] < 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--zero-stage", "7"], "(from --zero-stage): expected 0, 1, 2 or 3"),
        (["--dtype", "fp64"], "(from --dtype)"),
        (["--tp", "2", "--processes", "3"], "--tp 2 does not divide --processes 3"),
        (["--tp", "0"], "hybrid_engine.inference_tp_size = 0 (from --tp): expected greater"),
        (["--tp", "-1"], "(from --tp): expected greater than or equal to 1"),
        (["--set", "ppo.kl=1"], "unknown setting"),
        pytest.param(["--model", "./nowhere"], "no such directory", marks=pytest.mark.slow),
    ],
)
def test_bad_input_is_one_line(flags, message, run_cli):
    done = run_cli("verify", *flags)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
