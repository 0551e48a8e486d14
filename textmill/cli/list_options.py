"""Options that take lists: ``--data.train a.txt b.txt``, which jsonargparse reads as one value in JSON."""

import json
from collections.abc import Mapping
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser

from lm.common.errors import UserError


def join_lists(arguments: list[str], commands: Mapping[str, ArgumentParser]) -> list[str]:
    """Return the arguments as jsonargparse needs them: options with underscores, and as one value the texts after an
    option that takes a list. ``commands`` has the parser of each command."""
    if not arguments or arguments[0] not in commands:
        return arguments
    actions = commands[arguments[0]]._option_string_actions
    types = {option: getattr(action, "_typehint", None) for option, action in actions.items()}
    lists = {option: get_args(kind)[0] for option, kind in types.items() if get_origin(kind) is list}
    groups: list[list[str]] = [[]]  # each an option and the arguments after it; the first starts with the command
    for argument in arguments:
        if argument.startswith("--"):
            groups.append([])
            name, equals, value = argument.partition("=")
            if (underscored := f"--{name[2:].replace('-', '_')}") in actions:
                argument = underscored + equals + value
        groups[-1].append(argument)
    given: set[str] = set()
    joined = groups[0]
    for group in groups[1:]:
        option, equals, value = group[0].partition("=")
        items = [value, *group[1:]] if equals else group[1:]
        if option in lists and option in given:
            raise UserError(f"{option} is given twice; name all its values after it once: {option} A B.")
        given.add(option)
        if option in lists and items and not (len(items) == 1 and _is_list(items[0], lists[option])):
            joined.append(f"{option}={json.dumps(items, ensure_ascii=False)}")
        else:
            joined += group
    return joined


def _is_list(text: str, item_type: Any) -> bool:
    """Return whether a text is a list in JSON or YAML. A list of texts needs quotes: ``[END]`` is one text."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader) if text.startswith("[") else None
    except yaml.YAMLError:
        return False
    if not isinstance(node, yaml.SequenceNode):
        return False
    return item_type is not str or all(item.style in ("'", '"') for item in node.value)
