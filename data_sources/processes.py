"""Work on the parts of a sequence in several processes; results come in the order of the parts.

Processes are spawned, not forked: a fork would copy the threads' locks of tokenizers, torch and
NCCL in whatever state they are.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing import current_process, get_context, parent_process
from typing import Any, TypeVar

log = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R")

# More would only take memory and time from each other.
_MOST_PER_CORE = 2
# What an object raises that cannot be pickled; one that is nested deeply is a RecursionError.
_UNSENT = (pickle.PicklingError, AttributeError, TypeError, RecursionError)

_work: Callable[[Any], Any]


def in_order(work: Callable[[P], R], parts: Iterable[P], workers: int) -> Generator[R, None, None]:
    """Yields the results of all parts; few parts and results are in memory at a time.

    Close it where you may stop before the end (`contextlib.closing`): what collects garbage may do
    so in a thread of the pool, which would wait for itself.

    Where processes cannot start, one is killed, or the work cannot be sent to them, this one does
    the rest. It does also each part that cannot be sent.

    Args:
        work: has no state of its own.
        parts: are taken as they are needed.
        workers: processes; 1 works in this one. No more than 2 for each core are started.
    """
    parts, workers = iter(parts), _that_help(workers)
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
                with _interrupts_held():
                    results.append(pool.submit(_call, part))
                if len(waiting) > 2 * workers:
                    yield _result(results.popleft(), work, waiting[0])
                    waiting.popleft()
            while waiting:
                yield _result(results.popleft(), work, waiting[0])
                waiting.popleft()
        except BrokenProcessPool as error:
            log.warning(
                "one of %d processes could not start or was killed (is memory short? see "
                "data.workers); this process goes on alone: %s",
                *(workers, error),
            )
        except BaseException:
            _end(pool)
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    yield from map(work, waiting)
    yield from map(work, parts)


def _can_be_sent(work: Callable[[Any], Any]) -> bool:
    try:
        pickle.dumps(work)
    except _UNSENT:
        return False
    return True


def _that_help(workers: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    most = _MOST_PER_CORE * (cores or 1)
    if workers > most:
        log.warning(
            "data.workers = %d: %d processes work, %d for each of the cores",
            *(workers, most, _MOST_PER_CORE),
        )
    return min(workers, most)


def _result(found: Future[R], work: Callable[[P], R], part: P) -> R:
    try:
        return found.result()
    except _UNSENT:
        return work(part)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes that start meanwhile never see an interrupt; this one sees it afterwards.

    Ctrl-C reaches every process of the terminal, and those that still import cannot ignore it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(pool: ProcessPoolExecutor) -> None:
    """Ends the processes at once: nobody wants what they would go on to finish."""
    for process in list((pool._processes or {}).values()):
        process.terminate()


def _receive(work: Callable[[Any], Any]) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
