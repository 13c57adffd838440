"""Where the work of a stage runs: in this process, or on the cores of this machine.

An engine only calls functions on items. Every function writes its result under a name that depends on the item
alone, and computes with a fixed number of threads; so the number of workers changes the time and nothing else.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ..artifacts import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Engine(Protocol):
    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Results in any order. `function` and items must be picklable; results should be small."""
        ...


@dataclass(frozen=True)
class Local:
    """This machine: `workers` processes, or none beside this one if there is one worker."""

    workers: int = 1

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        if self.workers == 1 or len(items) < 2:
            yield from map(function, items)
            return
        # spawn: a forked process would inherit locks of torch's and faiss's threads
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(self.workers, len(items)), mp_context=context) as pool:
            queue = list(reversed(items))
            running: set[Future[Result]] = set()
            try:
                while queue or running:
                    while queue and len(running) < 2 * self.workers:
                        running.add(pool.submit(function, queue.pop()))
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            except BrokenProcessPool as error:
                raise UserError(
                    "a worker process died, most likely for want of memory; run the same command again to go on, "
                    "with fewer --workers"
                ) from error
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
