"""Run a function on many items: in this process, in worker processes of this machine, or on a Ray cluster.

Functions and items are pickled. Results should be small: large ones are written to files named after the item. With a
fixed number of threads per function, a result does not depend on the executor.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing import resource_tracker
from typing import Any, Self, TypeVar

from .artifacts import UserError
from .plugins import load_plugins, loaded_plugins

STOPPING = (signal.SIGINT, signal.SIGTERM)
WORKERS_PER_GPU = 8  # each holds a CUDA context and its networks in the GPU's memory
Item = TypeVar("Item")
Result = TypeVar("Result")


class Executor:
    """Worker processes of this machine, or with one worker this process; `with executor:` holds them for every `map`.

    They load the plugins of this process, end with it and leave Ctrl-C to it.
    """

    worker_died: tuple[type[Exception], ...] = (BrokenProcessPool,)

    def __init__(self, workers: int = 1) -> None:
        if workers < 1:
            raise UserError(f"--workers {workers}: must be at least 1")
        self.workers, self.in_process = workers, workers == 1
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._pool is not None:
            if error is not None:  # an item may take minutes, and is repeated by the next run
                for worker in list((self._pool._processes or {}).values()):
                    worker.kill()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def map(
        self, function: Callable[[Item], Result], items: Iterable[Item], gpus: float = 0, retries: int = 0
    ) -> Iterator[tuple[int, Result]]:
        """Yield (index of an item, its result) as they finish; reads `items` only as workers become free.

        An item whose worker died is repeated up to `retries` times. `gpus` is what one item occupies of a Ray
        cluster; a local worker uses the device its item names. An exception of the function ends the map.
        """
        if self.in_process:
            yield from ((index, function(item)) for index, item in enumerate(items))
            return
        waiting: Iterator[tuple[int, Item, int]] = ((index, item, 0) for index, item in enumerate(items))
        running: dict[Future[Result], tuple[int, Item, int]] = {}  # index, item, how often its worker died
        while True:
            for task in islice(waiting, 2 * self.workers - len(running)):
                running[self._submit(gpus, loaded_plugins(), pickle.dumps((function, task[1])))] = task
            if not running:
                return
            done = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
            index, item, deaths = running.pop(done)
            try:
                result = self._result_of(done)
            except self.worker_died as error:
                if deaths == retries:
                    raise UserError(
                        "a worker process died, most likely because memory ran out; run the same command again "
                        "with fewer --workers"
                    ) from error
                waiting = chain([(index, item, deaths + 1)], waiting)
            else:
                yield index, result

    def _submit(self, gpus: float, *task: Any) -> Future[Any]:
        resource_tracker.ensure_running()  # if it were started with the first worker, it would unblock the signals
        # a new worker has signals blocked until `start_worker`, and a pool is never left half started
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            if self._pool is None or self._pool._broken:
                # spawned: a forked process would inherit locks of torch's and faiss's threads
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.workers, context, start_worker, (os.getpid(),))
            return self._pool.submit(call, *task)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _result_of(self, future: Future[Result]) -> Result:
        return future.result()


class RayExecutor(Executor):
    """A Ray cluster: the one at `address`, or one started on this machine.

    Every node must see the source and the folder of --out under the same path, as on a shared file system.
    """

    def __init__(self, address: str | None = None) -> None:
        super().__init__()
        self.address, self.in_process = address, False

    def __enter__(self) -> Self:
        try:
            import ray
        except ImportError as error:
            raise UserError("--engine ray: needs ray; pip install 'atoll-diffusion[ray]'") from error
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        try:
            if self._started:
                ray.init(self.address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"--ray-address {self.address}: cannot reach the cluster ({error})") from error
        self.resources: dict[str, float] = self._ray.cluster_resources()
        self.workers = max(1, int(self.resources.get("CPU", 1)))
        errors: Any = ray.exceptions
        self.worker_died = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._started:
            self._ray.shutdown()

    def _submit(self, gpus: float, *task: Any) -> Future[Any]:
        if gpus and not self.resources.get("GPU"):
            raise UserError("--device: the Ray cluster has no GPU; use cpu, or a cluster with GPUs")
        remote = self._ray.remote(call).options(num_cpus=1, num_gpus=gpus, max_retries=0).remote(*task)
        future: Future[Any] = remote.future()
        return future

    def _result_of(self, future: Future[Result]) -> Result:
        try:
            return future.result()
        except self._ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, UserError | FileNotFoundError):
                raise
            shared = "every node must see the source and --out under the same path"
            raise UserError(f"a Ray worker failed: {error.cause}; {shared}") from error


def make_executor(name: str, workers: int = 1, address: str | None = None) -> Executor:
    """The executor of `--engine`."""
    if name not in ("local", "ray"):
        raise UserError(f"--engine {name}: use local or ray")
    return RayExecutor(address) if name == "ray" else Executor(workers)


def default_workers(device: str) -> int:
    """One per core; on a GPU at most as many as fit into its memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if device == "cpu" else min(cores, WORKERS_PER_GPU)


def start_worker(parent: int) -> None:
    """Ignore Ctrl-C, which reaches all processes of a terminal, and end when the parent has ended, however it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def call(plugins: Mapping[str, str], task: bytes) -> Any:
    """Call a pickled (function, item), which may be defined in a plugin: so that is loaded first."""
    load_plugins(plugins)
    function, item = pickle.loads(task)
    return function(item)


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads inside: sums depend on how they are split."""
    import torch  # slow, and the executor itself has no use for it

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
