import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_app.config.schema import HybridEngineSettings
from rlhf_app.hybrid_engine import Breakdown, Generator, HybridEngine, SamplingParams
from rlhf_app.hybrid_engine import engine as engine_module

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("deepspeed_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_engine_on_deepspeed(ranks, tmp_path):
    """Tokens equal native generate after every update; addresses stay; ranks never wait."""
    compiled = tmp_path / "extensions"
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={ranks}", str(WORKER), "0", "1", "2", "3",
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TORCH_EXTENSIONS_DIR": str(compiled),
        },
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("ok")] == [
        "ok 0", "ok 1", "ok 2", "ok 3",
    ]  # fmt: skip
    # DeepSpeed compiled nothing: that takes minutes, and a lock left by a killed compiler
    # makes every later start wait for ever.
    assert not compiled.exists()


class _Inner:
    """Stands where DeepSpeed's engine stands."""

    module_forward_pre_hook = None
    module_forward_post_hook = None

    def __init__(self, module):
        self.module = module
        self.world_size = 1
        self.lr = 0.5

    def train(self):
        self.module.train()

    def eval(self):
        self.module.eval()

    def zero_optimization_stage(self):
        return 0

    def __call__(self, **inputs):
        return self.module(**inputs)


def test_everything_else_is_deepspeeds(build):
    model = build("llama")
    inner = _Inner(model)
    engine = HybridEngine(inner, HybridEngineSettings())
    assert engine.module is model
    engine.lr = 0.25
    assert inner.lr == 0.25
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018
    assert isinstance(engine.generator, Generator)


@pytest.mark.parametrize("mode", [True, False])
def test_rollout_keeps_the_mode(mode, build, prompts):
    model = build("llama")
    engine = HybridEngine(_Inner(model), HybridEngineSettings())
    engine.train(mode)
    engine.rollout(prompts, SamplingParams(3))
    assert model.training is mode


def test_rollout_takes_a_limit_per_answer(build, prompts):
    engine = HybridEngine(_Inner(build("llama")), HybridEngineSettings())
    limits = [1 + i % 3 for i in range(len(prompts))]
    rollout = engine.rollout(prompts, SamplingParams(3), limits=limits)
    assert list(map(len, rollout.tokens)) == limits


def test_breakdown_books_each_second_once(build, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(engine_module.time, "perf_counter", lambda: clock.now)
    model = build("llama")
    engine = HybridEngine(_Inner(model), HybridEngineSettings())

    def rollout(*_):
        clock.now += 5.0
        engine.weights.gather_seconds += 1.5
        engine.generator.samples += 4
        engine.generator.tokens += 30
        engine.generator.form = "eager (CPU)"

    monkeypatch.setattr(engine.generator, "rollout", rollout)
    clock.now += 100.0  # set-up
    engine.eval()
    assert engine.breakdown == Breakdown()
    engine.rollout([[1]], SamplingParams(1))
    clock.now += 2.0
    engine.train()
    clock.now += 3.0
    engine.train()
    engine.eval()
    assert engine.breakdown == Breakdown(
        total=10.0, gather=1.5, generate=3.5, training=3.0, samples=4, tokens=30,
        form="eager (CPU)",
    )  # fmt: skip
    assert engine.breakdown.others == 2.0
    assert str(engine.breakdown) == (
        "E2E latency=10.00s | Gather latency=1.50s | Generate time=3.50s | "
        "Training time=3.00s | Others=2.00s | 0.40 samples/s | 6.0 tokens/s | eager (CPU)"
    )


def test_config_reaches_deepspeed_without_our_block(build, monkeypatch):
    seen = {}

    def fake(**arguments):
        seen.update(arguments)
        return _Inner(arguments["model"]), "optimizer", "loader", "schedule"

    import deepspeed

    monkeypatch.setattr(deepspeed, "initialize", fake)
    model = build("llama")
    args = SimpleNamespace(deepspeed_config=None, local_rank=0)
    config = {"train_batch_size": 4, "hybrid_engine": {"enabled": True, "max_out_tokens": 9}}
    engine, *rest = engine_module.initialize(args, model, config_params=config)
    assert rest == ["optimizer", "loader", "schedule"]
    assert seen["config"] == {"train_batch_size": 4}
    assert seen["args"].local_rank == 0
    assert engine.settings.max_out_tokens == 9
    off, *_ = engine_module.initialize(args, model, config=config, enable_hybrid_engine=False)
    assert off.settings.enabled is False
