"""Runs that are killed or stopped in the middle, and what must be the same afterwards."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("sft", "reward", "ppo")
# Times, and what follows from them.
_TIMES = ("time", "seconds", "tokens_per_second")


def command(out: Path, settings: Mapping[str, Any], *more: str) -> list[str]:
    """The command line of a run with some dotted settings."""
    sets = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    return [sys.executable, "-m", "rlhf_app", "train", "--output-dir", str(out), *sets, *more]


def start(argv: Sequence[str], directory: Path | None = None) -> subprocess.Popen[str]:
    """Starts a run, in a group of its own, with its output to read."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        argv,
        env=env,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(
    argv: Sequence[str], timeout: float = 240, directory: Path | None = None
) -> tuple[int, str]:
    """Runs to the end; exit code and output."""
    process = start(argv, directory)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output


def wait_for(
    process: subprocess.Popen[str], condition: Callable[[], bool], timeout: float = 120
) -> bool:
    """Waits until something is so; False where the run has ended before."""
    end = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            return condition()
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)
    return True


def steps_done(out: Path, stage: str) -> int:
    """Training records in the stage's metrics so far."""
    return len([row for row in records(out, stage) if row["kind"] == "train"])


def records(out: Path, stage: str) -> list[dict[str, Any]]:
    """The whole lines of a metrics file."""
    path = out / stage / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The worker processes under a controller, by rank."""
    found = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "rlhf_app.commands.worker" in child.cmdline() and (
                    "torch.distributed.run" not in child.cmdline()
                ):
                    found[int(child.environ().get("RANK", "0"))] = child
    return [found[rank] for rank in sorted(found)]


def left_over(out: Path) -> list[psutil.Process]:
    """Processes that still have to do with a run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(str(out) in word for word in process.cmdline()):
                found.append(process)
    return found


def outcome(out: Path) -> dict[str, Any]:
    """All that an interruption must not change, by name."""
    return dict(_outcome(out))


def _outcome(out: Path) -> Iterator[tuple[str, Any]]:
    for stage in STAGES:
        if not (out / stage).is_dir():
            continue
        for name in ("model", "actor", "critic", "actor_ema"):
            if (out / stage / name).is_dir():
                yield f"{stage}/{name}", _hash(out / stage / name, out)
        yield f"{stage} metrics", [_timeless(row) for row in records(out, stage)]
        result = json.loads((out / stage / "result.json").read_text(encoding="utf-8"))
        yield f"{stage} result", _timeless(result)
        samples = out / stage / "samples.jsonl"
        if samples.is_file():
            yield f"{stage} samples", samples.read_text(encoding="utf-8")


def _hash(artifact: Path, out: Path) -> str:
    """Of all names and bytes; where the run lies makes no difference (adapters name their base)."""
    total = hashlib.sha256()
    for path in sorted(path for path in artifact.rglob("*") if path.is_file()):
        content = path.read_bytes().replace(str(out).encode(), b"")
        total.update(str(path.relative_to(artifact)).encode() + b"\0")
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()


def _timeless(values: Any) -> Any:
    if isinstance(values, dict):
        return {
            key: _timeless(value)
            for key, value in values.items()
            if not key.endswith(_TIMES) and key not in ("rollout_checks", "seconds")
        }
    return [_timeless(value) for value in values] if isinstance(values, list) else values
