"""One worker process of one stage: `python -m rlhf_app.commands.worker RUN_DIR STAGE`.

Or of `rlhf verify`, whose checks are a job like a stage.

The controller starts it, alone or once per rank under torchrun; run by hand it prints to the
terminal. RANK, LOCAL_RANK and WORLD_SIZE decide its part (unset: the only one).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from rlhf_app.config.load import load_saved
from rlhf_app.config.schema import STAGES, JobName, RunConfig
from rlhf_app.deployment.child_process import LOG_TO_FILES, die_with_parent
from rlhf_app.deployment.failures import WorkerError, write_error
from rlhf_app.deployment.worker_lock import hold
from rlhf_app.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    Interrupted,
)
from rlhf_app.origins import OWN_PACKAGES, check_origins
from rlhf_app.run_directory import RunDirectory
from rlhf_app.training import heartbeat
from rlhf_app.training.checkpoint.requests import own_handlers
from rlhf_app.training.files import atomic_write_json
from rlhf_app.training.out_of_memory import explained
from rlhf_app.training.safe_load import force_safe_loading
from rlhf_app.url_secrets import WithoutSecrets


def main(arguments: list[str] | None = None) -> int:
    """Run this process's part of a stage.

    Args:
        arguments: run directory and stage; None takes the command line.

    Returns:
        Exit code: 0, 1 on a failure, 2 on bad input, 3 where the stage stopped because it was
        asked to. On failures and bad input `error_rank<r>.json` says what happened.
    """
    run_path, stage = _parse(sys.argv[1:] if arguments is None else arguments)
    run = RunDirectory(run_path)
    rank = int(os.environ.get("RANK", "0"))
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    to_files = os.environ.get(LOG_TO_FILES) == "1"
    if to_files:
        _redirect_output(run.log(stage, rank))
        die_with_parent(signal.SIGKILL)
    handler = logging.StreamHandler()
    handler.setFormatter(WithoutSecrets(f"%(asctime)s rank {rank} %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    if to_files and rank == 0:
        _note_warnings(run.warnings(stage))
    lock = hold(run)  # until the process ends
    if to_files:
        heartbeat.start(run.heartbeats(stage) / f"rank{rank}")
    try:
        check_origins()
        force_safe_loading()
        config = load_saved(run.config)
        _check_device(config)
        if config.deterministic:
            from rlhf_app.training.seeding import make_deterministic

            make_deterministic()
        with own_handlers(), explained(config, stage, int(os.environ["WORLD_SIZE"])):
            _job_module(stage).main(config, run)
    except Interrupted as interrupted:
        logging.info("%s", interrupted)
        if rank == 0:
            names = ("step", "total_steps", "saved")
            values = {name: getattr(interrupted, name) for name in names}
            atomic_write_json(run.interrupted(stage), values)
        return EXIT_INTERRUPTED
    except Exception as error:
        described = WorkerError.from_exception(error)
        print(described.traceback, file=sys.stderr)
        write_error(run.error(stage, rank), described)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) else EXIT_FAILED
    finally:
        lock.close()
    return EXIT_OK


def _parse(arguments: list[str]) -> tuple[Path, JobName]:
    jobs: tuple[JobName, ...] = (*STAGES, "verify")
    if len(arguments) == 2:
        for job in jobs:
            if arguments[1] == job:
                return Path(arguments[0]), job
    usage = f"usage: python -m rlhf_app.commands.worker RUN_DIR {{{','.join(jobs)}}}"
    print(usage, file=sys.stderr)
    raise SystemExit(EXIT_BAD_INPUT)


def _redirect_output(path: Path) -> None:
    """Send this process's output, native libraries' included, to its own log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def _note_warnings(path: Path) -> None:
    """Write the warnings of this project's own code where the controller finds them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, mode="w", encoding="utf-8", delay=True)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(WithoutSecrets())
    handler.addFilter(lambda record: record.name.split(".")[0] in OWN_PACKAGES)
    logging.getLogger().addHandler(handler)


def _check_device(config: RunConfig) -> None:
    """Refuse a GPU deployment that this torch cannot serve, before any model is loaded."""
    if config.deployment.type not in ("single_gpu", "single_node"):
        return
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"deployment.type = {config.deployment.type}: torch {torch.__version__} sees no "
            "CUDA device; use --deployment-type cpu, or install a CUDA build of torch"
        )


def _job_module(job: JobName) -> ModuleType:
    # By name and only here: the library must not import a stage at module top.
    name = "rlhf_app.hybrid_engine.verify" if job == "verify" else f"stages.{job}.train"
    return importlib.import_module(name)


def leave(code: int) -> NoReturn:
    """End the process with everything written, but without tearing the interpreter down.

    A communication thread that wakes while Python is being torn down aborts the process
    ("terminate called without an active exception"), now and then, after all work was done;
    and after a failure a process group whose peers still wait could hang there.
    """
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()  # what multiprocessing runs before its own os._exit
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
