"""Starts the ranks of a worker script by forking a process that has everything imported.

Importing torch, DeepSpeed, peft and the stages takes each process five seconds or more, which is
most of what a test of tiny models costs. Every line of standard input is a request, answered by
one line of the same kind:

    {"command": ["worker.py", "ARGUMENT"], "ranks": 2, "env": {}, "cwd": "DIR", "port": 29500,
     "stdout": "FILE", "stderr": "FILE", "timeout": 240}
    {"returncode": 0}      (null: time was up)

As torchrun does, it gives each rank RANK, WORLD_SIZE and so on, and ends all when one fails.
What it cannot show: ranks forked from one process share the seed of Python's hashes, and with it
the order of sets; and that a worker imports what it needs. Some tests of each stage therefore
stay under torchrun.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def preload() -> None:
    """Imports only: no thread may run when a process forks."""
    for name in (
        "peft", "transformers.models.llama.modeling_llama", "stages.sft.train",
        "stages.reward.train", "stages.ppo.train",
    ):  # fmt: skip
        importlib.import_module(name)
    importlib.import_module("rlhf_app.training.deepspeed_module").load_deepspeed()
    # ZeRO imports torch's compiler with it, at its first optimizer.
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread"


def be_rank(request: dict[str, Any], rank: int) -> None:
    """The rest of a forked process."""
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(request[name], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as DeepSpeed was imported
    if request["ranks"] > 1:
        size = str(request["ranks"])
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size,
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]),
        )  # fmt: skip
    os.chdir(request["cwd"])
    sys.argv = request["command"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def fork(request: dict[str, Any], rank: int, answers: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.close(answers)
        be_rank(request, rank)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(children: set[int], until: float) -> int | None:
    """The first status that is not 0; None where time is up. Nobody is left behind."""
    found: int | None = 0
    while children and found == 0:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            children.discard(child)
            found = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until:
            found = None
        else:
            time.sleep(0.02)
    for child in children:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return found


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what imports print is no answer
    preload()
    for line in sys.stdin:
        request = json.loads(line)
        until = time.monotonic() + request["timeout"]
        children = {fork(request, rank, answers) for rank in range(request["ranks"])}
        reply = json.dumps({"returncode": wait(children, until)})
        os.write(answers, reply.encode() + b"\n")
    os._exit(0)  # unloading all that was imported takes seconds


if __name__ == "__main__":
    main()
