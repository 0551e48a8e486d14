"""One model for many clients: a thread that runs an :class:`lm.inference.engine.Engine` while there is work.

Between two decode steps it computes a chunk of the new prompts, so that a long prompt does not stop the others. Source:
Yu et al. 2022 (Orca: sequences join and leave the batch between steps).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from lm.inference.chunk_size import MAX_TOKENS, ChunkSize
from lm.inference.engine import Engine
from lm.inference.generation_request import Generation
from lm.model.transformer import TransformerLM

log = logging.getLogger(__name__)

OnFinish = Callable[[Generation, Exception | None], None]
T = TypeVar("T")


class QueueFull(RuntimeError):
    """The queue is full; retry later."""


class SchedulerClosed(RuntimeError):
    """The scheduler was closed."""


class Scheduler:
    """Accepts generations from any thread and runs them in batches, in one thread of its own.

    At most ``max_batch_size`` generations run at once, and as many as have room in ``kv_bytes``; see
    :class:`lm.inference.engine.Engine` for this, ``max_seq_len`` and ``prefix_cache_bytes``. At most ``max_waiting``
    more wait. A free place goes to each request in turn, so that one with many generations does not keep the others
    waiting. If the next one has no room yet, those after it wait too, so that a long one has its turn.

    ``on_token`` and ``on_finish`` are called in the scheduler's thread. A generation whose prompt or ``on_token`` fails
    ends with the error, alone. If a decoding step fails, the longest generation ends, and the others repeat the step.
    """

    def __init__(
        self,
        model: TransformerLM,
        max_batch_size: int,
        max_waiting: int,
        prefix_cache_bytes: int = 0,
        max_seq_len: int | None = None,
        kv_bytes: int | None = None,
    ) -> None:
        self._engine = Engine(model, max_batch_size, max_seq_len, prefix_cache_bytes, kv_bytes)
        self._chunk_size = ChunkSize()
        self.capacity = max_batch_size + max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[deque[Generation]] = deque()  # of each request; the first has the next free row
        self._on_finish: dict[Generation, OnFinish] = {}  # of all unfinished generations
        self._jobs: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of unfinished generations."""
        return len(self._on_finish)

    @property
    def running_count(self) -> int:
        """Number of generations in the batch."""
        return len(self._engine.active)

    @property
    def waiting_count(self) -> int:
        """Number of generations in the queue."""
        with self._changed:
            return sum(not generation.finish_reason for request in self._waiting for generation in request)

    @property
    def num_prefilled_tokens(self) -> int:
        """Number of tokens of prompts that were computed so far."""
        return self._engine.num_prefilled_tokens

    @property
    def max_seq_len(self) -> int:
        """Number of tokens that a sequence can have."""
        return self._engine.max_seq_len

    @property
    def kv_bytes(self) -> int:
        """Bytes that the keys and values of all sequences can take."""
        return self._engine.kv_bytes

    @property
    def kv_tokens(self) -> int:
        """Number of tokens whose keys and values fit into them."""
        return self._engine.kv_tokens

    @property
    def is_running(self) -> bool:
        """Whether the scheduler's thread is alive."""
        return self._thread.is_alive()

    def submit(self, generations: Sequence[Generation], on_finish: OnFinish) -> None:
        """Queue all ``generations`` of a request, or none.

        ``on_finish`` is called once for each, with the error that ended it, or with None.

        Raises UserError for a bad prompt, QueueFull if the queue is full, and RuntimeError after :meth:`close`.
        """
        for generation in {id(generation.prompt): generation for generation in generations}.values():
            self._engine.check_prompt(generation)  # once for all copies of a prompt
        with self._changed:
            if self._is_closed:
                raise SchedulerClosed("The scheduler is closed.")
            if len(self) + len(generations) > self.capacity:
                raise QueueFull(f"The queue is full: {len(self)} of {self.capacity} places are taken. Retry later.")
            if generations:
                self._waiting.append(deque(generations))
            self._on_finish.update(dict.fromkeys(generations, on_finish))
            self._changed.notify()

    def submit_job(self, job: Generator[None, None, T]) -> Future[T]:
        """Queue another computation with the model, and return the future of its result.

        After each decoding step, one of the jobs runs to its next ``yield``, each in turn. Cancelling the future ends
        its job. Raises QueueFull if as many jobs wait as generations can, and SchedulerClosed after :meth:`close`.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                raise SchedulerClosed("The scheduler is closed.")
            if len(self._jobs) >= self.capacity:
                raise QueueFull(f"The queue is full: it holds {len(self._jobs)} jobs. Retry later.")
            self._jobs.append((job, future))
            self._changed.notify()
        return future

    def cancel(self, generation: Generation) -> None:
        """End a generation early. Its row is free at the next step; a finished one is unchanged."""
        with self._changed:
            generation.finish_reason = generation.finish_reason or "stop"
            self._changed.notify()

    def close(self) -> None:
        """Stop after the current step. Unfinished generations and jobs end with SchedulerClosed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            self._admit()
            self._decode()
            self._prefill()
            self._run_job()
            with self._changed:
                finished = [generation for generation in self._on_finish if generation.finish_reason]
                if finished:  # those that waited and were cancelled would stay until a row is free
                    unfinished = (deque(one for one in request if not one.finish_reason) for request in self._waiting)
                    self._waiting = deque(filter(None, unfinished))
            self._notify(finished)
        for generation in list(self._on_finish):
            generation.fail(SchedulerClosed("The scheduler was closed."))
        self._notify(list(self._on_finish))
        for _, future in self._jobs:
            if future.set_running_or_notify_cancel():
                future.set_exception(SchedulerClosed("The scheduler was closed."))

    def _run_job(self) -> None:
        """Compute a step of the job whose turn it is."""
        if not self._jobs:
            return
        job, future = self._jobs[0]
        result, error, is_finished = None, None, future.cancelled()
        if not is_finished:
            try:
                next(job)
            except StopIteration as end:
                result, is_finished = end.value, True
            except Exception as failure:
                log.exception("A job failed.")
                error, is_finished = failure.with_traceback(None), True
        with self._changed:
            self._jobs.popleft()
            if not is_finished:
                self._jobs.append((job, future))
        if is_finished and future.set_running_or_notify_cancel():
            if error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _wait(self) -> bool:
        """Wait for work; return False after :meth:`close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._on_finish or self._jobs)
            return not self._is_closed

    def _admit(self) -> None:
        """Give the generations that wait free rows and pages, as many as there are."""
        with self._changed:
            while self._waiting:
                request = self._waiting[0]
                generation, is_admitted = request[0], False
                if not generation.finish_reason:  # else it was cancelled
                    try:
                        is_admitted = self._engine.admit(generation)
                    except Exception as error:
                        log.exception("The engine failed.")
                        generation.fail(error.with_traceback(None))
                    if not (is_admitted or generation.finish_reason):
                        return
                request.popleft()
                self._waiting.popleft()
                if request:
                    self._waiting.append(request)

    def _decode(self) -> None:
        """Compute a decode step. While it fails, the longest generation ends: it needs the most memory."""
        started = time.monotonic()
        is_decoding = bool(self._engine.decoding)
        while error := _attempt(self._engine.decode):
            decoding = [generation for generation in self._engine.decoding if not generation.finish_reason]
            if not decoding:
                return
            max(decoding, key=lambda generation: generation.window_length).fail(error)
        if is_decoding:
            self._chunk_size.record_step(time.monotonic() - started)

    def _prefill(self) -> None:
        """Compute a chunk of prompts. If it fails, each is computed alone, and those that fail again end."""
        started, before = time.monotonic(), self._engine.num_prefilled_tokens
        max_tokens = self._chunk_size.num_tokens if self._engine.decoding else MAX_TOKENS
        error = _attempt(partial(self._engine.prefill, max_tokens))
        if error is None:
            self._chunk_size.record_chunk(self._engine.num_prefilled_tokens - before, time.monotonic() - started)
            return
        prefilling = [generation for generation in self._engine.prefilling if not generation.finish_reason]
        for generation in prefilling:
            if len(prefilling) > 1:
                error = _attempt(partial(self._engine.prefill, max_tokens, [generation]))
            if error is not None:
                generation.fail(error)

    def _notify(self, generations: list[Generation]) -> None:
        for generation in generations:
            with self._changed:
                on_finish = self._on_finish.pop(generation)
            try:
                on_finish(generation, generation.error)
            except Exception:  # e.g. a disconnected client; the others must still be notified
                log.exception("The callback of a finished generation failed.")


def _attempt(compute: Callable[[], None]) -> Exception | None:
    """Return the error of ``compute``, without its frames: they would keep their tensors in memory."""
    try:
        compute()
    except Exception as error:
        log.exception("The engine failed.")
        return error.with_traceback(None)
    return None
