"""Where the work of a stage runs: in this process, on the cores of this machine, or on a Ray cluster.

An engine only calls functions on items. Every function writes its result under a name that depends on the item
alone, and computes with a fixed number of threads; so the engine changes the time and nothing else.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..artifacts import UserError

STOPS = (signal.SIGTERM, signal.SIGINT)
RETRIES = 3  # of work whose worker died
WORKERS_PER_GPU = 8  # each holds a context and the networks there

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers(Protocol):
    """Workers at hand. Results come in any order; functions and items are pickled, and results should be small."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]: ...


class Engine(Protocol):
    def start(self) -> AbstractContextManager[Workers]:
        """Workers for the time of a `with` block."""
        ...


@dataclass(frozen=True)
class Local:
    """This machine: `workers` processes, or none beside this one if there is one worker."""

    workers: int = 1

    @contextmanager
    def start(self) -> Iterator[Workers]:
        if self.workers < 1:
            raise UserError(f"--workers {self.workers}: must be at least 1")
        if self.workers == 1:
            yield ThisProcess()
            return
        # spawn: a forked process would inherit locks of torch's and faiss's threads
        context = multiprocessing.get_context("spawn")
        others = multiprocessing.active_children()
        with ProcessPoolExecutor(
            self.workers, mp_context=context, initializer=end_with, initargs=(os.getpid(),)
        ) as pool:
            try:
                yield Pool(pool, self.workers)
            except BaseException:
                # a task may have minutes to go, and half-done ones are begun again anyway
                for worker in multiprocessing.active_children():
                    if worker not in others:
                        worker.terminate()
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def workers_for(device: str) -> int:
    """One per core; on a GPU no more than it has room for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if device == "cpu" else min(cores, WORKERS_PER_GPU)


def end_with(parent: int) -> None:
    """Let this process end when its parent does, however that ends: it would hold memory, and write where others do.

    Ctrl-C goes to all processes of a terminal; the parent alone answers.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # `unstopped` blocked it until here

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def unstopped() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until this block is done: a pool that is left while it starts its thread and its
    processes can neither be used nor closed. Processes started here are deaf to Ctrl-C until `end_with` decides.
    """
    if sys.platform == "win32":
        yield  # no signal can be blocked there
        return
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        with noted():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


@contextmanager
def noted() -> Iterator[None]:
    """Note Ctrl-C and SIGTERM in the main thread, the only one that handles them, and let them through afterwards."""
    met: list[int] = []
    listens = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in STOPS} if listens else {}
    before = {number: handler for number, handler in before.items() if handler is not None}  # None: not Python's
    try:
        for number in before:
            signal.signal(number, lambda number, frame: met.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for stopped in dict.fromkeys(met):
            signal.raise_signal(stopped)


class ThisProcess:
    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        return map(function, items)


@dataclass(frozen=True)
class Pool:
    pool: ProcessPoolExecutor
    workers: int

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        waiting = list(reversed(items))
        running: set[Future[Result]] = set()
        try:
            while waiting or running:
                # a few ahead keep everybody busy; all at once would pickle every item now
                while waiting and len(running) < 2 * self.workers:
                    with unstopped():
                        running.add(self.pool.submit(function, waiting.pop()))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process died, most likely for want of memory; run the same command again to go on, "
                "with fewer --workers"
            ) from error


@dataclass(frozen=True)
class Ray:
    """A Ray cluster: the one at `address`, or one started on this machine.

    Every node must see what is read and the folder of --out under the same path, as on a shared file system. With
    `gpu`, tasks go to GPUs, `per_gpu` to each.
    """

    address: str | None = None
    gpu: bool = False
    per_gpu: int = WORKERS_PER_GPU

    @contextmanager
    def start(self) -> Iterator[Workers]:
        try:
            import ray
        except ImportError as error:
            raise UserError("--engine ray: needs ray; pip install 'atoll-diffusion[ray]'") from error
        started = not ray.is_initialized()
        if started:
            try:
                ray.init(
                    address=self.address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise UserError(f"--ray-address {self.address}: cannot reach the cluster ({error})") from error
        try:
            cluster: Any = ray
            if self.gpu and not cluster.cluster_resources().get("GPU"):
                raise UserError("--device: the Ray cluster has no GPU; use cpu, or a cluster that has some")
            yield RayTasks(ray, 1 / self.per_gpu if self.gpu else 0)
        finally:
            if started:
                ray.shutdown()


@dataclass(frozen=True)
class RayTasks:
    ray: Any
    gpu_share: float

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        remote = self.ray.remote(num_cpus=1, num_gpus=self.gpu_share, max_retries=RETRIES)(function)
        most = 2 * max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        waiting = list(reversed(items))
        running: list[Any] = []
        while waiting or running:
            while waiting and len(running) < most:
                running.append(remote.remote(waiting.pop()))
            done, running = self.ray.wait(running)
            try:
                yield from self.ray.get(done)
            except self.ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, UserError | FileNotFoundError):
                    raise UserError(
                        f"a Ray worker failed: {cause}; every node must see what is read and --out under the same path"
                    ) from error
                raise
            except self.ray.exceptions.RayError as error:
                first = str(error).strip().splitlines()[0]
                raise UserError(
                    f"a Ray worker died {1 + RETRIES} times at the same part ({first[:100]}); run the same command "
                    "again to go on, with more memory for each worker"
                ) from error


def engine_named(
    name: str, workers: int, address: str | None, device: str = "cpu", per_gpu: int = WORKERS_PER_GPU
) -> Engine:
    if name == "local":
        return Local(workers)
    if name == "ray":
        return Ray(address, gpu=device != "cpu", per_gpu=per_gpu)
    raise UserError(f"--engine {name}: use local or ray")
