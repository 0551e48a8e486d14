"""Initial weights: drawn when a model is made, or later, one matrix at a time, so that no process holds all."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

_late: "LateWeights | None" = None  # inside ``draw_later``


class LateWeights:
    """Matrices that have no memory yet, in the order in which they are drawn."""

    def __init__(self) -> None:
        self._sources: list[tuple[nn.Parameter, float | Tensor]] = []  # the standard deviation, or the numbers

    def add(self, weight: nn.Parameter, std: float) -> None:
        """Free the memory of ``weight`` until it is drawn."""
        weight.untyped_storage().resize_(0)
        self._sources.append((weight, std))

    def replace(self, numbers: Mapping[nn.Parameter, Tensor]) -> None:
        """Take these numbers, which may be those of memory-mapped files, in place of drawn ones."""
        self._sources = [(weight, numbers[weight]) for weight in dict.fromkeys(weight for weight, _ in self._sources)]

    def __iter__(self) -> Iterator[nn.Parameter]:
        """Yield each matrix with the numbers that it would have had at once. One that is drawn twice comes twice.

        The caller may free its memory again.
        """
        for weight, source in self._sources:
            weight.untyped_storage().resize_(weight.nbytes)
            _fill(weight, source)
            yield weight

    def draw(self) -> None:
        """Draw all matrices."""
        for _ in self:
            pass


@contextmanager
def draw_later() -> Iterator[LateWeights]:
    """Make models inside of the ``with`` block without their matrices. Vectors are there: they are small."""
    global _late
    before, _late = _late, LateWeights()
    try:
        yield _late
    finally:
        _late = before


def truncated_normal_(weight: nn.Parameter, std: float) -> None:
    """Fill ``weight`` in place from N(0, std²) truncated at ±3 std, with zeros if ``std`` is 0; inside of
    :func:`draw_later` when it is drawn."""
    if _late is None:
        _fill(weight, std)
    else:
        _late.add(weight, std)


def _fill(weight: nn.Parameter, source: float | Tensor) -> None:
    if isinstance(source, Tensor):
        weight.detach().copy_(source)
    elif source:
        nn.init.trunc_normal_(weight, mean=0.0, std=source, a=-3 * source, b=3 * source)
    else:
        nn.init.zeros_(weight)
