"""Work on the parts of a sequence in several processes; results come in the order of the parts.

Processes are spawned, not forked: a fork would copy the threads' locks of tokenizers, torch and
NCCL in whatever state they are.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from multiprocessing import current_process, get_context, parent_process
from typing import Any, TypeVar

log = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R")

_work: Callable[[Any], Any]


def in_order(work: Callable[[P], R], parts: Iterable[P], workers: int) -> Generator[R, None, None]:
    """Yields the results of all parts; few parts and results are in memory at a time.

    Close it where you may stop before the end (`contextlib.closing`): what collects garbage may do
    so in a thread of the pool, which would wait for itself.

    Where processes cannot start, one is killed, or the work cannot be sent to them, this one does
    the rest.

    Args:
        work: has no state of its own.
        parts: are taken as they are needed.
        workers: processes; 1 works in this one.
    """
    parts = iter(parts)
    # Parts whose results have not been yielded, and those results.
    waiting: deque[P] = deque()
    results: deque[Future[R]] = deque()
    if workers > 1 and not current_process().daemon and _can_be_sent(work):
        # One part is not worth a process.
        first = list(islice(parts, 2))
        if len(first) < 2:
            yield from map(work, first)
            return
        parts = chain(first, parts)
        pool = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_receive, initargs=(work,)
        )
        try:
            for part in parts:
                waiting.append(part)  # before it is submitted, which fails after a crash
                results.append(pool.submit(_call, part))
                if len(waiting) > 2 * workers:
                    yield results.popleft().result()
                    waiting.popleft()
            while waiting:
                yield results.popleft().result()
                waiting.popleft()
        except BrokenProcessPool as error:
            log.warning(
                "one of %d processes could not start or was killed (is memory short? see "
                "data.workers); this process goes on alone: %s",
                *(workers, error),
            )
        finally:
            pool.shutdown(cancel_futures=True)
    yield from map(work, waiting)
    yield from map(work, parts)


def _can_be_sent(work: Callable[[Any], Any]) -> bool:
    try:
        pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def _receive(work: Callable[[Any], Any]) -> None:
    global _work
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there are as many processes as cores
    _work = work


def _end_with_parent() -> None:
    """Where the parent is killed, nothing else would tell this process to end."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(part: Any) -> Any:
    return _work(part)
