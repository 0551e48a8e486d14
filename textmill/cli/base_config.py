"""The configuration that the options of a command line change: that of the last run, or the base of a sweep."""

import argparse
import sys

from flows.config import PipelineConfig
from flows.sweep_config import load_sweep
from lm.common.errors import UserError
from textmill.cli.terminal import print_message
from textmill.runs.last_config import describe_reuse, last_config


def read_last_config(root: str, is_again: bool, is_fresh: bool, preset: str | None) -> PipelineConfig | None:
    """Return the configuration of the last run, and print a line about it, if a run or a plan starts from it: at a
    terminal, and with ``--again``, unless a preset is named."""
    if is_again and (is_fresh or preset):
        raise UserError(f"--again starts from the last run, --{'fresh' if is_fresh else 'preset'} does not; use one.")
    if is_fresh or preset or not (is_again or _is_terminal()):
        return None
    if not (last := last_config(root)):
        if is_again:
            raise UserError(f"--again needs an earlier run, but {root} has no runs.")
        return None
    if line := describe_reuse(*last):
        print_message(line)
    return last[1]


def _is_terminal() -> bool:
    return all(stream and stream.isatty() for stream in (sys.stdin, sys.stdout))


def read_sweep_base(arguments: list[str]) -> PipelineConfig | None:
    """Return the base of the sweep that a command line names."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--size", nargs="?", default="")
    size, rest = parser.parse_known_args(arguments[1:])
    if arguments[0] == "speedrun":
        rest = ["speedrun", *rest]
    if not rest or {"-h", "--help"} & {*rest}:
        return None
    if rest[0].startswith("-"):  # without its base, the sweep's options would be those of another configuration
        raise UserError("Name the sweep first: textmill sweep NAME [options].")
    return load_sweep(rest[0], size.size or "").base
