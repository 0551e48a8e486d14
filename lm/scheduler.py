"""Many clients, one model: a thread that steps an :class:`lm.generate.Engine` while there is work.

Source: Yu et al. 2022 (Orca: sequences join and leave the batch between steps).
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from lm.generate import Engine, Generation
from lm.model import TransformerLM

log = logging.getLogger(__name__)

OnEnd = Callable[[Generation, Exception | None], None]


class Busy(RuntimeError):
    """As many generations wait as may; the same may be taken a little later."""


class Scheduler:
    """Generations from any thread, up to ``max_batch_size`` side by side; up to ``max_waiting`` more wait in order.

    Their ``on_token`` is called in the scheduler's own thread, as is what is called at their end. Where the engine
    fails, those that it had begun end with the error, and the next ones go on.
    """

    def __init__(self, model: TransformerLM, max_batch_size: int, max_waiting: int) -> None:
        self._engine = Engine(model, max_batch_size)
        self.capacity = max_batch_size + max_waiting
        """How many generations there may be at once."""
        self._changed = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._on_end: dict[Generation, OnEnd] = {}  # of all that are not over
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many generations are not over."""
        return len(self._on_end)

    def submit(self, generations: Sequence[Generation], on_end: OnEnd) -> None:
        """Take all of ``generations`` or none; ``on_end`` is called once for each, with the error that ended it, if one
        did.

        Raises UserError for a bad prompt, Busy where too many wait, and RuntimeError once closed.
        """
        for generation in generations:
            self._engine.check(generation)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("The scheduler is closed.")
            if len(self) + len(generations) > self.capacity:
                raise Busy(f"{len(self)} completions are under way or wait, of at most {self.capacity}; try again.")
            self._waiting.extend(generations)
            self._on_end.update(dict.fromkeys(generations, on_end))
            self._changed.notify()

    def cancel(self, generation: Generation) -> None:
        """End it: its row is free at the next step. One that is over stays as it is."""
        with self._changed:
            generation.ended = generation.ended or "stop"
            self._changed.notify()

    def close(self) -> None:
        """Stop after the step; what is not over ends with a RuntimeError."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (admitted := self._admit()) is not None:
            error: Exception | None = None
            failed: set[Generation] = set()
            try:
                if admitted:
                    self._engine.add(admitted)
                self._engine.step()
            except Exception as failure:
                log.exception("The engine failed.")
                error = failure
                failed = {one for one in (*admitted, *self._engine.live) if not one.ended}
                for generation in failed:
                    generation.ended = "stop"  # so that the engine lets go of it
            with self._changed:
                over = [generation for generation in self._on_end if generation.ended]
            self._tell([one for one in over if one not in failed], None)
            self._tell([one for one in over if one in failed], error)
        self._tell(list(self._on_end), RuntimeError("The scheduler was closed."))

    def _admit(self) -> list[Generation] | None:
        """Sleep until there is work; the generations that free rows are for, None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._on_end)
            if self._is_closed:
                return None
            self._waiting = deque(one for one in self._waiting if not one.ended)  # those not cancelled
            room = self._engine.max_batch_size - sum(not one.ended for one in self._engine.live)
            return [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]

    def _tell(self, generations: list[Generation], error: Exception | None) -> None:
        for generation in generations:
            with self._changed:
                on_end = self._on_end.pop(generation)
            try:
                on_end(generation, error)
            except Exception:  # a client that is gone; the others shall have their answers
                log.exception("A client could not be told of its end.")
