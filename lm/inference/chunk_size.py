"""How many tokens of prompts are computed between two decode steps.

Source: Agrawal et al. 2024 (Sarathi-Serve: stall-free batching).
"""

# A chunk reads the keys and values of all tokens before it, so fewer than the minimum take hardly less time late in a
# long prompt. With more than the maximum, a CPU computes hardly more of them a second.
MIN_TOKENS, MAX_TOKENS = 64, 512
_MAX_RATIO = 2.0  # of a chunk's time to that of a step: a pause of a text is then about three steps long
_SMOOTHING = 0.2  # weight of the latest step


class ChunkSize:
    """Chooses ``num_tokens``, so that a chunk takes at most twice the time of a decode step. It begins small."""

    def __init__(self) -> None:
        self.num_tokens = MIN_TOKENS
        self._step_seconds: float | None = None

    def record_step(self, seconds: float) -> None:
        """Record the time of a decode step."""
        before = self._step_seconds or seconds
        self._step_seconds = before + _SMOOTHING * (seconds - before)

    def record_chunk(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a chunk. One of fewer tokens than there could be says nothing about more."""
        if self._step_seconds is None or num_tokens < self.num_tokens:
            return
        fitting = num_tokens * _MAX_RATIO * self._step_seconds / max(seconds, 1e-9)
        self.num_tokens = int(max(MIN_TOKENS, min(fitting, 2 * self.num_tokens, MAX_TOKENS)))
