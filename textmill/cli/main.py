"""The command ``textmill``: run a subcommand, and turn user errors, signals and a closed output into an exit code."""

import argparse
import errno
import os
import select
import sys
from pathlib import Path

from jsonargparse import Namespace

from flows.config import PipelineConfig
from flows.prefect_support.settings_errors import explain_settings_error, mute_settings_errors
from flows.prefect_support.signals import STOPPED_MESSAGE, find_interrupt, handle_termination, signal_number
from flows.sweep_config import load_sweep
from lm.common.errors import UserError
from textmill.cli.console import discard_stream, flush_messages, prepare_streams, print_message
from textmill.cli.parser import build_parser, parse

# Prefect and its ephemeral server read these settings when they are imported.
_PREFECT_SETTINGS = {
    # The terminal shows the project's own log lines. Prefect's UI shows Prefect's too, such as errors and tracebacks.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # Send no telemetry.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    # On a busy machine, the ephemeral server needs more than the default 20 s to start.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
}

_RUN_FLOWS = {"run", "posttrain", "sweep", "profile", "tokenizers"}
_KEEP_NOTHING = {"sample", "chat", "tokenizers", "export"}  # commands whose work is lost if they are stopped


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: success, also of ``serve``, which runs until it is stopped. 1: ``verify`` found damage. 2: a user error, printed
    as one message. 129: stopped by SIGHUP, as a closed terminal sends. 130: stopped by Ctrl-C. 141: nobody reads the
    output any more. 143: stopped by SIGTERM. Other exceptions are bugs and propagate.
    """
    handle_termination()
    prepare_streams()
    for name, value in _PREFECT_SETTINGS.items():
        os.environ.setdefault(name, value)
    mute_settings_errors()
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else ""
    try:
        code = _run(arguments)
        if sys.stdout is not None:  # None: it was closed before the start
            sys.stdout.flush()
    except BaseException as error:
        if interrupt := find_interrupt(error):
            print_message("textmill: stopped." if command in _KEEP_NOTHING else STOPPED_MESSAGE)
            code = 128 + signal_number(interrupt)
        elif explained := error if isinstance(error, UserError) else explain_settings_error(error):
            print_message(f"textmill: {explained}")
            code = 2
        elif isinstance(error, BrokenPipeError) and _is_output_closed():  # e.g. head has read enough
            discard_stream(sys.stdout)
            code = 141
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC and _is_output_full():
            discard_stream(sys.stdout)
            print_message(f"textmill: The output cannot be written: {error.strerror}.")
            code = 2
        else:
            raise
    flush_messages()
    if "flows.run_stages" in sys.modules:  # otherwise no flow can have run, and importing Prefect would take seconds
        from flows.prefect_support.liveness import exit_if_server_is_gone

        exit_if_server_is_gone(code)
    return code


def _is_output_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # it reports errors in any case
    return bool(poll.poll(0))


def _is_output_full() -> bool:
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _run(arguments: list[str]) -> int:
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(f"The working directory cannot be used: {error.strerror}. Change to another one.") from None
    preset = _preset_name(arguments)
    command = arguments[0] if arguments else None
    presets = {"posttrain_preset" if command == "posttrain" else "preset": preset}
    sweep_base = _sweep_base(arguments) if command == "sweep" else None
    parser = build_parser(**presets, sweep_base=sweep_base, only=command)
    parsed = parse(parser, arguments)
    options: Namespace = parser.instantiate(parsed)[parsed.command]
    if options.get("preset", preset) != preset:  # named in a file or by an abbreviation, which _preset_name ignores
        raise UserError(f"Name the preset on the command line: --preset {options.preset}")
    if parsed.command in _RUN_FLOWS:
        _use_local_stack()
    from textmill.cli import commands

    return getattr(commands, f"{parsed.command.replace('-', '_')}_command")(options) or 0


def _use_local_stack() -> None:
    """Report to the server of a running ``textmill up``, unless Prefect's settings name a server.

    A temporary server would write the same database.
    """
    from flows.prefect_support.local_stack import find_local_stack
    from textmill.cli.local_run import is_server_configured

    if not is_server_configured() and (url := find_local_stack()):
        os.environ["PREFECT_API_URL"] = f"{url}/api"
        if "prefect" in sys.modules:  # it has read its settings already, to see whether they name a server
            from prefect.context import refresh_global_settings_context

            refresh_global_settings_context()
        print_message(f"This run reports to the server of textmill up, {url}.")


def _preset_name(arguments: list[str]) -> str:
    """Return the preset, which is needed to build the parser."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?", const="demo", default="demo")
    return str(parser.parse_known_args(arguments)[0].preset)


def _sweep_base(arguments: list[str]) -> PipelineConfig | None:
    """Return the base of the sweep that a command line names, which is needed to build the parser."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--size", nargs="?", default="")
    size, rest = parser.parse_known_args(arguments[1:])
    if not rest or {"-h", "--help"} & {*rest}:
        return None
    if rest[0].startswith("-"):  # without its base, the sweep's options would be those of another configuration
        raise UserError("Name the sweep first: textmill sweep NAME [options].")
    return load_sweep(rest[0], size.size or "").base
