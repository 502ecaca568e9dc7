"""A tiny byte-level language model, and a way to run one stage over any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

RunStage = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory) -> Path:
    """A random Llama whose tokens are bytes; its padding token is its EOS."""
    import transformers as tf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"</s>": 0, "<s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    fast = Tokenizer(models.BPE(vocabulary, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    tf.PreTrainedTokenizerFast(
        tokenizer_object=fast, eos_token="</s>", bos_token="<s>", pad_token="</s>"
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=0, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def run_stage(repo_root: Path, tmp_path: Path, run_ranks: Callable[..., Any]) -> RunStage:
    """Runs a stage with the given settings; returns result.json and the metrics records.

    Ranks fork from a process that has imported all; with `torchrun`, they start on their own.
    """

    def run(
        stage: str, rows: list[dict[str, Any]], model: Path, *, ranks: int = 1,
        torchrun: bool = False, **settings: Any,
    ) -> dict[str, Any]:  # fmt: skip
        out = tmp_path / f"{stage}-{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        data = out / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "output_dir": str(out),
            "stages": [stage],
            "model": {
                "actor": str(model),
                "dtype": settings.pop("dtype", "auto"),
                "reward": settings.pop("reward_model", None),
            },
            "data": {
                "sources": [{"path": str(data)}],
                "split": "shared",
                "chat_format": "plain",
                **settings.pop("data", {}),
            },
            "hybrid_engine": settings.pop("hybrid_engine", {}),
            stage: settings,
        }
        (out / "test_config.json").write_text(json.dumps(config))
        worker = [str(Path(__file__).with_name("stage_runs.py")), str(out), stage]
        if torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            environment = dict(os.environ) | {"PYTHONPATH": str(repo_root), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, *launcher, *worker],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240,
            )  # fmt: skip
        else:
            done = run_ranks(*worker, ranks=ranks, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = (out / stage / "metrics.jsonl").read_text().splitlines()
        result = json.loads((out / stage / "result.json").read_text())
        return {
            "result": result,
            "metrics": [json.loads(line) for line in lines],
            "model": out / stage / "model",
        }

    return run


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, tiny_lm: Path) -> list[str]:
    """Flags of a run of three stages that takes seconds, with a checkpoint every other step."""
    directory = tmp_path_factory.mktemp("small_run")
    words = ["the", "cat", "dog", "sun", "big", "red", "blue", "happy", "small", "tree", "day"]
    pairs = directory / "pairs.jsonl"
    with pairs.open("w") as file:
        for row in range(240):
            prompt, good, bad = (
                " ".join(words[(row * k + i * (k + 1)) % len(words)] for i in range(5))
                for k in (3, 5, 7)
            )
            record = {"prompt": f"{prompt} {row}", "chosen": good, "rejected": bad}
            file.write(json.dumps(record) + "\n")
    config = directory / "config.yaml"
    sizes = "batch_size: 8, micro_batch_size: 4, max_steps: 8, eval_every: 3"
    config.write_text(
        f"model: {{actor: {tiny_lm}, dtype: fp32}}\n"
        f"data: {{sources: [{pairs}], split: shared}}\n"
        "checkpoint: {every_steps: 2}\n"
        f"sft: {{{sizes}}}\n"
        f"reward: {{{sizes}}}\n"
        "ppo: {updates: 5, rollout_batch_size: 8, micro_batch_size: 4, mini_batches: 1, "
        "max_prompt_length: 80, max_response_length: 12, eval_every: 2, eval_prompts: 8}\n"
    )
    return ["--config", str(config)]
