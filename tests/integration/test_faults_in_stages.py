"""Memory that runs out, and numbers that are none, in every phase of every stage.

Each stage runs in this process, by the worker's own entry point, until a planted fault ends it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_app.commands import worker
from rlhf_app.config.schema import RunConfig
from rlhf_app.config.yaml_files import dump_config
from rlhf_app.deployment.supervise import _failure
from rlhf_app.errors import EXIT_BAD_INPUT, ConfigError, StageFailed
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training.distributed import close
from rlhf_app.training.saving import gather_state_dict

ROWS = [{"prompt": f"{i:02d}", "chosen": " yes" * (1 + i % 2), "rejected": " no"} for i in range(8)]
EVAL = [{"prompt": "other", "chosen": " thing", "rejected": " none"}]
CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB of "
    "which 1.25 GiB is free."
)
TRAINED = {"learning_rate": 1e-3, "lr_schedule": "constant"}
STEPS = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 2, "eval_every": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": TRAINED | STEPS | {"samples": 0, "keep_best": "loss"},
    "reward": TRAINED | STEPS | {"keep_best": "loss"},
    "ppo": {
        "actor": TRAINED, "critic": TRAINED, "updates": 2, "eval_every": 1, "keep_best": "reward",
        "rollout_batch_size": 4, "micro_batch_size": 2, "mini_batches": 1, "eval_prompts": 1,
        "max_prompt_length": 8, "max_response_length": 4,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The worker is made for a process of its own."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    level = logging.getLogger().level
    yield
    close()
    logging.getLogger().setLevel(level)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@dataclass
class Ended:
    """How a stage came to its end."""

    code: int
    line: str
    run: RunDirectory
    stage: str

    def artifact(self) -> str | None:
        """Hash of the artifact's weights, or None where there is none."""
        path = self.run.artifact(self.stage)  # type: ignore[arg-type]
        if not path.exists():
            return None
        return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def stage_until_fault(tiny_lm: Path, tmp_path: Path) -> Callable[..., Ended]:
    def run_stage(stage: str, **changes: Any) -> Ended:
        for name, rows in (("data", ROWS), ("eval", EVAL)):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / f"{name}.jsonl").write_text(text)
        settings = dict(SETTINGS[stage])
        if stage == "ppo":
            (tmp_path / "my.py").write_text(
                "def score(prompts, responses):\n    return [float(len(r)) for r in responses]\n"
            )
            settings["rewards"] = [{"function": f"{tmp_path / 'my.py'}:score"}]
        settings |= changes
        config = RunConfig.model_validate(
            {
                "output_dir": str(tmp_path / "out"), "stages": [stage],
                "model": {"actor": str(tiny_lm)}, "deployment": {"type": "cpu"},
                "data": {
                    "sources": [{"path": str(tmp_path / "data.jsonl")}],
                    "eval": [{"path": str(tmp_path / "eval.jsonl")}],
                    "split": "shared", "chat_format": "plain",
                },
                stage: settings,
            }
        )  # fmt: skip
        run = RunDirectory(tmp_path / "out")
        run.path.mkdir()
        run.config.write_text(dump_config(config))
        code = worker.main([str(run.path), stage])
        assert run.result(stage).exists() == (code == 0)  # type: ignore[arg-type]
        line = ""
        if code:
            failed = _failure(run, stage, 1, code)  # type: ignore[arg-type]
            assert isinstance(failed, ConfigError if code == EXIT_BAD_INPUT else StageFailed)
            line = str(failed)
            assert "\n" not in line
        return Ended(code, line, run, stage)

    return run_stage


@dataclass
class Planted:
    """A function that fails once another has been entered for the `visits`-th time."""

    monkeypatch: pytest.MonkeyPatch
    visits: int = 0
    seen: list[Any] = field(default_factory=list)

    def arm(self, entrance: str, visit: int, on_entering: Callable[..., None]) -> None:
        real = _found(entrance)

        def entered(*arguments: Any, **named: Any) -> Any:
            self.visits += 1
            if self.visits == visit:
                on_entering(*arguments)
            return real(*arguments, **named)

        self.monkeypatch.setattr(entrance, entered)

    def fail(
        self, target: str, fault: Callable[[Any], Any], visit: int, where: Callable[[Any], bool]
    ) -> None:
        real = _found(target)

        def failing(*arguments: Any, **named: Any) -> Any:
            if self.visits < visit or not where(arguments[0]):
                return real(*arguments, **named)
            self.seen.append(target)
            return fault(None if fault is no_memory else real(*arguments, **named))

        self.monkeypatch.setattr(target, failing)


def _found(dotted: str) -> Any:
    return pkgutil.resolve_name(dotted)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(monkeypatch)


def no_memory(_: object) -> Any:
    raise torch.OutOfMemoryError(CUDA)


def always(_: object) -> bool:
    return True


def frozen(module: torch.nn.Module) -> bool:
    return not any(p.requires_grad for p in module.parameters())


FORWARD = "transformers.models.llama.modeling_llama.LlamaModel.forward"
# stage, phase, the function on whose entering the fault is armed, what fails, for which models
OUT_OF_MEMORY = [
    *(
        case
        for stage in ("sft", "reward")
        for case in (
            (stage, "model load", f"stages.{stage}.train.stage_inputs",
             "rlhf_app.models.load.join_storage", always),
            (stage, "evaluation", f"stages.{stage}.train.evaluate", FORWARD, always),
            (stage, "update", f"stages.{stage}.train.optimizer_step", FORWARD, always),
            (stage, "optimizer step", f"stages.{stage}.train.optimizer_step",
             "torch.optim.AdamW.step", always),
            (stage, "saving", f"stages.{stage}.train.optimizer_step",
             "rlhf_app.training.saving.gather_state_dict" if stage == "sft"
             else "rlhf_app.models.scalar_head.gather_state_dict", always),
        )
    ),
    ("ppo", "model load", "stages.ppo.train.load_parts",
     "rlhf_app.models.load.join_storage", always),
    ("ppo", "evaluation", "stages.ppo.held_out.evaluate_policy", FORWARD, always),
    ("ppo", "rollout", "stages.ppo.train.collect", FORWARD, always),
    ("ppo", "scoring", "stages.ppo.rollout._score", FORWARD, always),
    ("ppo", "scoring", "stages.ppo.rollout._score", "stages.ppo.rollout.score_answers", always),
    ("ppo", "reference forward", "stages.ppo.rollout._score", FORWARD, frozen),
    ("ppo", "update of critic", "stages.ppo.train.update_models", FORWARD, always),
    ("ppo", "update of actor", "stages.ppo.train.update_models",
     "stages.ppo.update.policy_logprobs", always),
    ("ppo", "optimizer step of critic", "stages.ppo.train.update_models",
     "torch.optim.AdamW.step", always),
    ("ppo", "saving", "stages.ppo.train.update_models",
     "rlhf_app.training.saving.gather_state_dict", always),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "phase", "entrance", "target", "where"),
    OUT_OF_MEMORY,
    ids=[f"{stage}-{phase}-{target[-14:]}" for stage, phase, _, target, _ in OUT_OF_MEMORY],
)
def test_memory_that_runs_out_is_one_line(
    stage, phase, entrance, target, where, stage_until_fault, planted
):
    planted.arm(entrance, 1, lambda *_: None)
    planted.fail(target, no_memory, 1, where)
    ended = stage_until_fault(stage)
    assert planted.seen == [target], "it ran out once, and nothing was tried again"
    assert ended.code == 1
    head = f"{stage}: rank 0 failed: OutOfMemory: {stage}: out of GPU memory in {phase} ("
    assert ended.line.startswith(head), ended.line
    assert "2.50 GiB wanted, 1.25 GiB of 139.80 GiB free" in ended.line
    assert ended.line.count(" -> ") == 3
    assert ended.line.endswith(f"(log: {ended.run.log(stage, 0)})")
    assert ended.artifact() is None


class Poison(torch.autograd.Function):
    """The same number, with an infinite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.inf


def bad_loss(result):
    loss, sums = result
    return loss * math.nan, sums


def bad_gradient(result):
    loss, sums = result
    return Poison.apply(loss), sums


NOT_FINITE = [
    *(
        (stage, f"stages.{stage}.train.optimizer_step", 2, f"stages.{stage}.train.{name}", *fault)
        for stage, name in (("sft", "cross_entropy"), ("reward", "final_token_loss"))
        for fault in (
            (bad_loss, "the loss is not finite (nan) on 1 of 1 ranks at optimizer step 2"),
            (bad_gradient, "the gradient norm is not finite ("),
        )
    ),
    # A step of the critic, then one of the actor in each update: 3 and 4 are the second's.
    *(
        ("ppo", "stages.ppo.update.optimizer_step", visit, f"stages.ppo.update.{name}", *fault)
        for visit, model, name in ((3, "critic", "value_loss"), (4, "actor", "actor_objective"))
        for fault in (
            (bad_loss, f"the {model} loss is not finite (nan) on 1 of 1 ranks at optimizer step 2"),
            (bad_gradient, "the gradient norm is not finite ("),
        )
    ),
    ("ppo", "stages.ppo.train.collect", 2, "stages.ppo.rollout.score_answers",
     lambda scores: scores * math.nan, "non-finite score in the rollout on 1 of 1 rank"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stage", "entrance", "visit", "target", "fault", "message"),
    NOT_FINITE,
    ids=[f"{case[0]}-{case[3].rpartition('.')[2]}-{case[4].__name__}" for case in NOT_FINITE],
)
def test_what_is_not_finite_ends_the_stage_with_nothing_touched(
    stage, entrance, visit, target, fault, message, stage_until_fault, planted, tmp_path
):
    """In the second step: the artifact of the first, kept by its evaluation, stays as it is."""
    artifact = {"ppo": "actor"}.get(stage, "model")
    weights = tmp_path / "out" / stage / artifact / "model.safetensors"
    engines, before = [], []

    def entered(first: Any, *_: Any) -> None:
        engines.extend([first.actor, first.critic] if hasattr(first, "critic") else [first])
        before.extend(_weights(engine) for engine in engines)
        before.append(weights.read_bytes())

    planted.arm(entrance, visit, entered)
    planted.fail(target, fault, visit, always)
    ended = stage_until_fault(stage)
    assert planted.seen
    assert ended.code == 1
    assert f"{stage}: rank 0 failed: NonFiniteError: " in ended.line
    assert message in ended.line
    assert before.pop() == weights.read_bytes()
    for engine, start in zip(engines, before, strict=True):
        for name, value in _weights(engine).items():
            assert torch.equal(value, start[name]), name
    assert "NaN" not in (ended.run.metrics(stage)).read_text()


def _weights(engine: Any) -> dict[str, torch.Tensor]:
    from rlhf_app.training.distributed import Dist

    here = Dist(0, 0, 1, torch.device("cpu"))
    return {k: v.clone() for k, v in gather_state_dict(engine.module, here).items()}


def silent(handler: BaseHTTPRequestHandler, answers: int) -> None:
    threading.Event().wait(5)


def reply(content: Callable[[int], Any]) -> Callable[[BaseHTTPRequestHandler, int], None]:
    def send(handler: BaseHTTPRequestHandler, answers: int) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(content(answers))

    return send


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (None, "connection refused, 2 time(s); is the server running?"),
        (silent, "no answer within 2 s, 2 time(s); is the server running?"),
        (reply(lambda _: b"<html>busy</html>"), "no JSON came back but '<html>busy</html>'"),
        (reply(lambda n: json.dumps({"scores": [1.0] * (n - 1)}).encode()), "scores for "),
        (reply(lambda n: json.dumps({"scores": [math.nan] * n}).encode()), "not a finite number"),
    ],
    ids=["down", "slow", "garbage", "fewer", "nan"],
)
def test_a_reward_endpoint_that_fails_ends_the_stage_soon(
    behaviour, message, stage_until_fault, monkeypatch
):
    """It answers at first: the evaluation before training has its scores."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    asked = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            count = len(json.loads(body)["responses"])
            asked.append(time.monotonic())
            if len(asked) <= 2 or behaviour is None:
                reply(lambda n: json.dumps({"scores": [1.0] * n}).encode())(self, count)
                if len(asked) == 2 and behaviour is None:
                    self.server.socket.close()
            else:
                behaviour(self, count)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_port}/score"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    source = {"http": url, "timeout": 2 if behaviour is silent else 30, "retries": 1}
    try:
        ended = stage_until_fault("ppo", rewards=[source])
    finally:
        server.shutdown()
        server.server_close()
    assert ended.code == EXIT_BAD_INPUT
    assert ended.line.startswith(f"reward endpoint {url}: ")
    assert message in ended.line
    assert time.monotonic() - asked[-1] < 10
    assert ended.artifact() is None


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_without_a_fault_the_stage_is_finished(stage, stage_until_fault):
    ended = stage_until_fault(stage)
    assert (ended.code, ended.line) == (0, "")
    assert ended.artifact() is not None
