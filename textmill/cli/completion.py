"""Completion of command lines: a script for bash, zsh or fish that knows all commands and options."""

from argparse import SUPPRESS
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser

from lm.common.errors import UserError

Shell = Literal["bash", "zsh", "fish"]

_FILES = ("config", "data.train", "data.valid", "dialogs.train", "dialogs.valid", "text")
_DIRECTORIES = ("root", "out", "path")


def completion_script(parser: ArgumentParser, shell: Shell) -> str:
    """Return the script that completes the commands, options and values of ``parser``. It changes the parser. Raises
    UserError if shtab is not installed."""
    try:
        import shtab
    except ImportError:
        raise UserError("Completion needs an extra: pip install 'textmill[completion]'.") from None
    subcommands = parser._subcommands_action
    for command in subcommands._name_parser_map.values() if subcommands else ():
        for action in command._actions:
            if type(action).__name__ == "_ActionConfigLoad":  # it reads a group of options from a file
                action.help = SUPPRESS
            # Without the forms of jsonargparse that append to a list.
            action.option_strings = [option for option in action.option_strings if not option.endswith("+")]
            _complete_value(action, shtab.FILE, shtab.DIRECTORY)
    script: str = shtab.complete(parser, shell)
    return script


def _complete_value(action: Any, file: Any, directory: Any) -> None:
    """Say what completes the value of an option: its choices, a file or a directory."""
    kind = getattr(action, "_typehint", None)
    if action.dest in _FILES or action.dest in _DIRECTORIES:
        action.complete = directory if action.dest in _DIRECTORIES else file
    elif get_origin(kind) is Literal:
        action.choices = get_args(kind)
    elif kind is bool:
        action.choices = ["true", "false"]
