"""A program. ``main``, which ``run_ranks`` calls, is one rank of it."""

import runpy
import sys

from tests.helpers.ranks import end_rank


def main() -> None:
    runpy.run_path(sys.argv[2], run_name="__main__")
    end_rank()
