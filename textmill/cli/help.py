"""The help of ``textmill`` and its commands, at most 80 columns wide.

``COMMAND --help`` shows the options that most people use, ``--help=GROUP`` those of a group such as ``train``, and
``--help=all`` every option.
"""

import shutil
import textwrap
from argparse import SUPPRESS, Action
from types import SimpleNamespace
from typing import Any, get_origin

from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter  # type: ignore[attr-defined]

from lm.common.errors import UserError, did_you_mean

_COLUMNS = 80

OVERVIEW = """\
textmill turns raw text into a language model, in cached stages.

Make a model
  run          train a tokenizer and a model on text, and sample from it
  plan         show what a run would do and why, and what it needs
  posttrain    fine-tune a model on dialogs, preferences or rewards
  sweep        compare many settings  speedrun   repeat a record
  teach        ask another model      dialogs    show fine-tuning data
  curate       filter and write text  explain    what a rule makes of a text
Use a model
  sample       write text             chat       chat in the terminal
  serve        serve OpenAI's API     export     for transformers or llama.cpp
Look at it
  runs         list, rename, delete   compare    draw losses of runs
  evaluate     ask a model the problems of a task, and count right answers
  tokenizers   compare tokenizers     profile    time and memory of a step
Keep house
  verify       check all files        gc         delete what no run needs
Run it later, or elsewhere
  up           start Prefect's server, the deployments and a worker
  deploy       have that server run it, on a schedule or an event
  train-job    train by torchrun      completion of commands in your shell

textmill COMMAND --help explains a command. textmill --version is the version.
"""

_SHORT_OPTIONS = {
    "run": "data.train budget preset config root name until refresh train.steps again fresh",
    "plan": "data.train budget preset config root until refresh train.steps again fresh",
    "deploy": "name cron timezone on evaluate alert data.train budget preset config root pool until",
    "train-job": "data.train budget preset config root train.steps execution.processes",
    "profile": "steps out data.train preset config root model.d_model train.batch_size",
    "curate": "data.train filter.rules deduplicate.equal format preset config root name until refresh plan",
    "explain": "text document filter.rules preset config",
    "posttrain": "base methods distill.teacher dialogs.train dialogs.task preset config root name until refresh plan",
    "sweep": "sweep size variant seeds root refresh plan data.train name",
    "speedrun": "size root refresh plan data.train data.valid",
}
"""The options that ``COMMAND --help`` shows. Other commands have few options, and it shows all."""

_PATHS = (
    *("data.train", "data.valid", "dialogs.train", "dialogs.valid"),
    *("filter.score.wanted", "filter.score.unwanted", "decontaminate.files"),
)


class HelpFormatter(DefaultHelpFormatter):
    """Shows the default of an option, but not its type."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=min(_COLUMNS, shutil.get_terminal_size().columns), max_help_position=24)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None) -> str:
        if prefix == "":  # the beginning of the usage of subcommands
            return self._prog
        names = [str(action.metavar or action.dest).upper() for action in actions if not action.option_strings]
        return " ".join(["usage:", self._prog.replace(" [options]", ""), "[options]", *names]) + "\n\n"

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        is_shown = action.default not in (None, SUPPRESS, "", False, []) and "efault" not in text
        if not is_shown or not action.option_strings or isinstance(action, ActionConfigFile):
            return text
        return f"{text.rstrip('.')} (default: %(default)s)"

    def _format_action_invocation(self, action: Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest).upper()
        names = action.option_strings[:1] if "+" in action.option_strings[-1] else action.option_strings
        return f"{', '.join(names)} {_metavar(action)}".rstrip()


def _metavar(action: Action) -> str:
    """Return what stands for the value of an option."""
    kind = getattr(action, "_typehint", None)
    if action.nargs == 0:
        return ""
    if get_origin(kind) is list:
        return "PATH …" if action.dest in _PATHS else "VALUE …"
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.metavar if isinstance(action.metavar, str) else action.dest.rpartition(".")[2].upper()


def format_command_help(parser: ArgumentParser, command: str, topic: str) -> str:
    """Return the help of a command. ``topic``: empty for the options that most people use, a group of options such as
    ``train``, or ``all``. Raises UserError for another topic."""
    names = list(dict.fromkeys(action.dest.partition(".")[0] for action in parser._actions if "." in action.dest))
    if topic not in ("", "all", *names):
        known = f"GROUP is one of {', '.join(names)}, all" if names else "this command has no groups"
        raise UserError(f"There is no help of {topic!r}{did_you_mean(topic, names)}: {known}.")
    closing = ""
    groups = [_select(group, topic) for group in parser._action_groups]
    if command in _SHORT_OPTIONS and not topic:
        actions = {action.dest: action for action in parser._actions}
        shown = [actions[name] for name in _SHORT_OPTIONS[command].split()]
        groups = [SimpleNamespace(title="options", description=None, _group_actions=shown)]
        lines = [f"All options of a group: textmill {command} --help=GROUP", f"Groups: {', '.join(names)}; or all."]
        closing = "\n" + "\n".join(textwrap.fill(line, _COLUMNS, subsequent_indent="  ") for line in lines) + "\n"
    all_groups, parser._action_groups = parser._action_groups, groups
    try:
        return parser.format_help() + closing
    finally:
        parser._action_groups = all_groups


def _select(group: Any, topic: str) -> Any:
    """Return a group of options with those of a topic, without the option that jsonargparse adds to read a group from a
    file."""
    shown = [
        action
        for action in group._group_actions
        if type(action).__name__ != "_ActionConfigLoad"
        and (topic in ("", "all") or action.dest.startswith(f"{topic}."))
    ]
    return SimpleNamespace(title=group.title, description=None, _group_actions=shown)
