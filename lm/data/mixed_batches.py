"""Batches that mix several sources by their weights, and stop at a limit of epochs for each source.

No number is drawn: in each step, and from the first step to any other, the sequences of a source are its weight times
all sequences, up to less than one sequence. A step needs the whole part of each source's share, and one sequence more
of some sources. Which ones is the problem of proportionate fairness: m of k tasks run in a time slot, each at its own
rate. The algorithm PD² solves it (Anderson and Srinivasan 2001, "Mixed Pfair/ERfair scheduling of asynchronous periodic
tasks"; the problem is of Baruah et al. 1996).
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from lm.common.errors import UserError
from lm.data.batches import check_length, permutation, shuffled_indices

_STEPS_PER_STATE = 1024  # between two states that a schedule keeps


@dataclass(frozen=True)
class MixedSource:
    """A source of the training and the validation text. The tokens of all sources lie one after the other."""

    name: str
    weight: float | None
    """Relative to the other weights. None: the source's share of all training tokens."""
    max_epochs: float | None
    """How often the source is read at most."""
    train_tokens: int
    valid_tokens: int
    bytes_per_token: float
    """Bytes of its validation text, without separators, per token."""


def read_sources(index: Mapping[str, Any], mix: Mapping[str, Mapping[str, float | None]]) -> list[MixedSource]:
    """Return the sources of a mixture in the order of their shards, which is that of the names.

    ``index`` is the content of the shards' ``index.json``: for ``train`` and ``valid``, the tokens, documents and bytes
    of each source. ``mix`` has ``weight`` and ``max_epochs`` by name.
    """
    separator_bytes, nothing = len(index["separator"].encode()), {"tokens": 0, "documents": 0, "bytes": 0}
    sources = []
    for name in sorted(mix):
        train, valid = (index[split]["sources"].get(name, nothing) for split in ("train", "valid"))
        bytes_per_token = (valid["bytes"] - valid["documents"] * separator_bytes) / max(1, valid["tokens"])
        limits = mix[name]["weight"], mix[name]["max_epochs"]
        sources.append(MixedSource(name, *limits, train["tokens"], valid["tokens"], bytes_per_token))
    return sources


def normalize_weights(sources: Sequence[MixedSource]) -> list[Fraction]:
    """Return the weights of sources, which add up to 1. A number such as 0.1 is exactly a tenth.

    Raises UserError if no source has a weight above 0.
    """
    tokens = sum(source.train_tokens for source in sources)
    weights = [
        Fraction(source.train_tokens, max(1, tokens)) if source.weight is None else Fraction(repr(float(source.weight)))
        for source in sources
    ]
    if not (total := sum(weights)):
        raise UserError("All weights of data.mix are 0; give at least one source a weight above 0.")
    return [weight / total for weight in weights]


class _Rates(NamedTuple):
    """Sequences of each source in a step: ``whole``, and ``parts / denominator`` of one more. These parts are ``extra``
    sequences of all sources."""

    whole: tuple[int, ...]
    parts: tuple[int, ...]
    denominator: int
    extra: int


class _State(NamedTuple):
    """A schedule before a step."""

    step: int
    phase_step: int
    """First step since which the same sources are read."""
    rates: _Rates
    extras: tuple[int, ...]
    """Sequences of each source since ``phase_step`` beyond the whole part of its rate."""
    totals: tuple[int, ...]
    """Sequences of each source in all earlier steps."""


class MixedSchedule:
    """How many sequences of each source a step has. A function of the step: no order of calls changes it.

    ``weights`` add up to 1. ``limits`` are the sequences that a source has at most; None: any number. In the step in
    which a source reaches its limit, the others share what is missing. From the next step on, only the others have
    sequences, in proportion to their weights. Raises UserError for a step in which no source has a sequence left.
    """

    def __init__(self, weights: Sequence[Fraction], batch_size: int, limits: Sequence[int | None]) -> None:
        self.weights, self.batch_size, self.limits = weights, batch_size, limits
        self._has_limits = any(limit is not None for limit in limits)
        zeros = (0,) * len(weights)
        self._states = [_State(0, 0, self._rates(zeros), zeros, zeros)]  # every _STEPS_PER_STATE steps
        self._last = self._states[0]

    def counts(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sequences of each source in all steps before ``step``, and in ``step``. The first step is 0."""
        state = self._find_state(step)
        return state.totals, self._count(state)

    def totals(self, steps: int) -> tuple[int, ...]:
        """Return the sequences of each source in the first ``steps`` steps, after which none may be left."""
        return self._find_state(steps).totals

    def _find_state(self, step: int) -> _State:
        state = self._last if self._last.step <= step else self._states[0]
        state = max(state, self._states[min(step // _STEPS_PER_STATE, len(self._states) - 1)])
        while state.step < step:
            state = self._next(state, self._count(state))
            if state.step == len(self._states) * _STEPS_PER_STATE:
                self._states.append(state)
        self._last = state
        return state

    def _left(self, totals: Sequence[int]) -> list[int]:
        """Return how many sequences each source has left, at most those of a batch."""
        pairs = zip(self.limits, totals, strict=True)
        return [self.batch_size if limit is None else min(self.batch_size, limit - total) for limit, total in pairs]

    def _rates(self, totals: Sequence[int]) -> _Rates:
        """Return the rates of the sources that have sequences left."""
        active = [
            weight if left else Fraction(0) for weight, left in zip(self.weights, self._left(totals), strict=True)
        ]
        shares = [weight * self.batch_size / (sum(active) or 1) for weight in active]
        denominator = np.lcm.reduce([share.denominator for share in shares], dtype=object)
        whole = tuple(int(share) for share in shares)
        parts = tuple(int((share - int(share)) * denominator) for share in shares)
        return _Rates(whole, parts, int(denominator), sum(parts) // int(denominator))

    def _count(self, state: _State) -> tuple[int, ...]:
        """Return the sequences of each source in the step of a state."""
        rates = state.rates
        extra = _choose_extra(rates, state.extras, state.step - state.phase_step)
        counts = tuple(whole + (index in extra) for index, whole in enumerate(rates.whole))
        if not self._has_limits:
            return counts
        left = self._left(state.totals)
        if sum(counts) == self.batch_size and all(count <= rest for count, rest in zip(counts, left, strict=True)):
            return counts
        return self._share_among_others(left)

    def _share_among_others(self, left: Sequence[int]) -> tuple[int, ...]:
        """Return the counts of a step in which a source has fewer sequences left than its share."""
        counts, missing = [0] * len(left), self.batch_size
        active = [index for index, weight in enumerate(self.weights) if weight and left[index]]
        while missing:
            if not active:
                raise UserError("All sources of data.mix have reached max_epochs; raise it, or lower train.steps.")
            shares = _apportion(missing, [self.weights[index] for index in active])
            full = [index for index, share in zip(active, shares, strict=True) if share >= left[index]]
            for index, share in zip(active, shares, strict=True):
                if not full or index in full:
                    counts[index] = min(share, left[index])
            missing = self.batch_size - sum(counts) if full else 0
            active = [index for index in active if index not in full]
        return tuple(counts)

    def _next(self, state: _State, counts: Sequence[int]) -> _State:
        """Return the state after a step with these counts."""
        totals = tuple(map(sum, zip(state.totals, counts, strict=True)))
        step = state.step + 1
        if self._has_limits and self._left(state.totals).count(0) < self._left(totals).count(0):
            return _State(step, step, self._rates(totals), (0,) * len(totals), totals)
        extras = zip(state.extras, counts, state.rates.whole, strict=True)
        return _State(
            step,
            state.phase_step,
            state.rates,
            tuple(extra + count - whole for extra, count, whole in extras),
            totals,
        )


def _choose_extra(rates: _Rates, extras: Sequence[int], slot: int) -> set[int]:
    """Return the sources that have one sequence beyond the whole part in a time slot, by the algorithm PD².

    The n-th extra sequence of a source with the rate w has the slots from ``floor((n - 1) / w)`` to ``ceil(n / w)``,
    which is its deadline. The earliest deadline is first. Among equal ones come those whose slots overlap with the next
    sequence's, the longest chain of such sequences without a free slot first.
    """
    one = rates.denominator
    ready: list[tuple[int, bool, int, int]] = []
    for index, part in enumerate(rates.parts):
        number = extras[index] + 1
        if not part or (number - 1) * one // part > slot:
            continue
        deadline, does_overlap = _ceil_div(number * one, part), number * one % part > 0
        group_deadline = 0
        if 2 * part >= one:
            rest = one - part
            group_deadline = _ceil_div(_ceil_div(deadline * rest, one) * one, rest)
        ready.append((deadline, not does_overlap, -group_deadline, index))
    ready.sort()
    return {index for *_, index in ready[: rates.extra]}


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _apportion(total: int, weights: Sequence[Fraction]) -> list[int]:
    """Divide ``total`` into whole numbers in proportion to weights, by the largest remainders."""
    shares = [weight * total / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


class MixedBatches:
    """The sequences of each batch of a training on several sources: a function of the seed and the step.

    An epoch of a source is as many sequences as its tokens have whole windows, in both orders of
    :func:`lm.data.batches.batch_starts`. Raises UserError if a source is shorter than the context, or if all have a
    limit and these are fewer sequences than ``steps`` need.
    """

    def __init__(
        self,
        sources: Sequence[MixedSource],
        batch_size: int,
        context_length: int,
        order: Literal["random", "shuffled_epochs"],
        seed: int,
        steps: int,
    ) -> None:
        self.sources, self.context_length, self.order, self.seed = sources, context_length, order, seed
        weights = normalize_weights(sources)
        for source, weight in zip(sources, weights, strict=True):
            if weight:
                check_length(range(source.train_tokens), context_length, f"training text of data.mix.{source.name}")
        self.windows = [(source.train_tokens - 1) // context_length for source in sources]
        limits = [
            None if source.max_epochs is None else int(Fraction(repr(float(source.max_epochs))) * windows)
            for source, windows in zip(sources, self.windows, strict=True)
        ]
        used = [limit for limit, weight in zip(limits, weights, strict=True) if weight]
        if None not in used and (most := sum(filter(None, used))) < (needed := steps * batch_size):
            raise UserError(
                f"The training reads {needed:,} sequences, and data.mix allows {most:,}: every source has max_epochs. "
                "Raise one, leave one out, or lower train.steps."
            )
        self.schedule = MixedSchedule(weights, batch_size, limits)
        self._offsets = [*accumulate((source.train_tokens for source in sources), initial=0)]
        # The name decides, so that another source does not change the order of this one.
        self._seeds = [(seed << 32) + zlib.crc32(source.name.encode()) for source in sources]
        # For each source, because a batch may span two epochs of each.
        self._permutations = [lru_cache(maxsize=2)(permutation) for _ in sources]

    def starts(self, step: int) -> list[int]:
        """Return the starts of the sequences of a batch in the tokens of all sources, in an order of no source."""
        parts = []
        for index, (first, count) in enumerate(zip(*self.schedule.counts(step), strict=True)):
            if not count:
                continue
            if self.order == "random":
                end = self.sources[index].train_tokens - self.context_length
                starts = np.random.default_rng((self._seeds[index], step)).integers(0, end, size=count)
            else:
                indices = shuffled_indices(
                    self.windows[index], first, count, self._seeds[index], self._permutations[index]
                )
                starts = indices * self.context_length
            parts.append(starts + self._offsets[index])
        rows: list[int] = np.random.default_rng((self.seed, step)).permutation(np.concatenate(parts)).tolist()
        return rows

    def sequences(self, steps: int) -> list[int]:
        """Return how many sequences of each source the first ``steps`` steps have."""
        return list(self.schedule.totals(steps))
