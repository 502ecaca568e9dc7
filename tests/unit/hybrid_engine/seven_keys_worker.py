"""Run by test_seven_keys.py under torchrun: what each key of the block does, printed as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf

from rlhf_app.commands.worker import leave
from rlhf_app.errors import ConfigError
from rlhf_app.hybrid_engine import HybridEngine, SamplingParams, initialize

LAYERS = 4
PROMPTS = [[5, 6, 7, 8], [9]]
PARAMS = SamplingParams(8, greedy=True)


def tiny_llama() -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config)


def config_of(block: dict[str, Any], stage: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": zero,
        **more,
        "hybrid_engine": block,
    }


def start(
    block: dict[str, Any], stage: int = 0, model: Any = None, config: Any = None, **more: Any
) -> HybridEngine:
    model = tiny_llama() if model is None else model
    config = config_of(block, stage, **more) if config is None else config
    engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.eval()
    return engine


def native_calls(engine: HybridEngine) -> int:
    """Calls of transformers' generate in one rollout."""
    calls = []
    generate = engine.module.generate
    engine.module.generate = lambda *a, **k: calls.append(1) or generate(*a, **k)
    engine.rollout(PROMPTS, PARAMS)
    return len(calls)


def whole_layers(engine: HybridEngine) -> tuple[int, int, list[list[int]]]:
    """Most layers whole at once in a decode step, bytes gathered per rollout, tokens."""
    seen = []

    def look(*_: Any) -> None:
        layers = engine.module.model.layers
        seen.append(sum(all(p.numel() > 0 for p in layer.parameters()) for layer in layers))

    engine.generator.capability  # noqa: B018 - the probe gathers as well
    before = engine.weights.gathered_bytes
    hooks = [layer.mlp.register_forward_hook(look) for layer in engine.module.model.layers]
    tokens = engine.rollout(PROMPTS, PARAMS).tokens
    for hook in hooks:
        hook.remove()
    return max(seen), engine.weights.gathered_bytes - before, tokens


def refusal(engine: HybridEngine, prompts: list[list[int]]) -> str:
    try:
        engine.rollout(prompts, PARAMS)
    except ConfigError as error:
        return str(error)
    return ""


def findings(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    engine = start({})
    found["reference"] = engine.rollout(PROMPTS, PARAMS).tokens
    found["enabled"] = {str(on): native_calls(start({"enabled": on})) for on in (True, False)}
    limited = start({"max_out_tokens": 12})
    found["max_out_tokens"] = [refusal(limited, [[5] * 4]), refusal(limited, [[5] * 5])]
    found["release_inference_cache"] = {}
    for release in (True, False):
        engine = start({"release_inference_cache": release})
        engine.rollout(PROMPTS, PARAMS)
        inside = engine.generator.workspace_bytes
        engine.train()
        found["release_inference_cache"][str(release)] = [inside, engine.generator.workspace_bytes]
    found["gather"] = {
        f"{pinned} {size}": whole_layers(
            start({"pin_parameters": pinned, "tp_gather_partition_size": size}, stage=3)
        )
        for pinned, size in ((True, 8), (False, 1), (False, 2))
    }
    shared = start({"inference_tp_size": 2})
    tokens = shared.rollout(PROMPTS, PARAMS).tokens
    found["inference_tp_size"] = [shared.weights.slice_bytes, shared.weights.whole_bytes, tokens]
    try:
        start({"inference_tp_size": 3})
    except ConfigError as error:
        found["tp refusal"] = str(error)
    # Half precision, in a dict and in a file; and that DeepSpeed reads no block.
    bf16 = {"bf16": {"enabled": True}}
    file = folder / f"ds{dist.get_rank()}.json"
    file.write_text(json.dumps(config_of({"enabled": True}, stage=2, **bf16)))
    found["half"] = {}
    for name, model, config in (
        ("half, file", tiny_llama().half(), str(file)),
        ("bf16, dict", tiny_llama().bfloat16(), None),
    ):
        engine = start({"enabled": True}, 2, model, config, **bf16)
        ids = torch.tensor([PROMPTS[0]] * 2)
        out = engine.generate(input_ids=ids, max_new_tokens=8)
        engine.train()
        engine.backward(engine(input_ids=out, labels=out).loss)
        engine.step()
        found["half"][name] = [str(next(engine.module.parameters()).dtype), list(out.shape)]
        found["seen by DeepSpeed"] = "hybrid_engine" in engine.deepspeed_engine._config._param_dict
        found["its engine"] = type(engine.deepspeed_engine).__name__
    return found


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    result = findings(Path(sys.argv[1]))
    dist.barrier()
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(result), flush=True)
    leave(0)
