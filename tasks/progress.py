"""Progress bars in a terminal; where output goes to a file they stay away, and the log's lines tell."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def progress_bar(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a bar; the function given is told how many of ``total`` are done."""
    with tqdm(total=total, desc=title, unit=unit, disable=None, leave=False, dynamic_ncols=True) as bar:

        def progress(done: int) -> None:
            bar.update(done - bar.n)

        yield progress
