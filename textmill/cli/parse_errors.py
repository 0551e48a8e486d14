"""Errors of jsonargparse in words for people: which option, its value, and what the value must be."""

import operator
import re
from argparse import Action
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from lm.common.errors import did_you_mean

_VALUES = (
    re.compile(r"(?:Got value|Given value): (.*)", re.DOTALL),
    re.compile(r"Not of type \w+: (.*) does not conform"),
    re.compile(r"""Unable to load config ['"](.*?)['"]""", re.DOTALL),
)
_BOUNDS = {operator.ge: "of at least", operator.gt: "above", operator.le: "of at most", operator.lt: "below"}
_NESTED_VALUE = re.compile(r"NestedArg\(key='(.*?)', val=(.*)\)")


def explain(message: str, actions: Iterable[Action], help_hint: str) -> str:
    """Return an error of a command line in one line. ``actions`` are those of the command, ``help_hint`` its help."""
    known = [*actions]
    options = [option for action in known for option in action.option_strings if option.startswith("--")]
    if match := re.match(r"""(?:Parser key|Key|Option) ["']?([\w.-]+)["']?""", message):
        return _explain_value(match[1], message, known, help_hint)
    if match := re.match(r"argument (\S+?)(?:/\S+)?: (.*)", message, re.DOTALL):
        option, problem = match.groups()
        action = next((action for action in known if option in (*action.option_strings, action.dest)), None)
        if action and "invalid choice" in problem:
            value = re.search(r"invalid choice: (.*) \(choose", problem, re.DOTALL)
            shown = value[1] if value else "not valid"
            return f"{option} is {shown}; it must be {describe_type(action)}. See {help_hint}."
        if "expected" in problem:
            return f"{option} needs a value. See {help_hint}."
        if "ignored explicit" in problem:
            return f"{option} takes no value. See {help_hint}."
    if match := re.search(r"does not accept option ['\"]?([\w.-]+)", message):
        return f"There is no option --{match[1]}{did_you_mean('--' + match[1], options)}. See {help_hint}."
    if match := re.search(r"unrecognized arguments: (.*)", message, re.DOTALL):
        wrong = match[1].split()[0].partition("=")[0]
        if not wrong.startswith("-"):
            return f"{match[1]!r} is not expected here: an option begins with --. See {help_hint}."
        return f"There is no option {wrong}{did_you_mean('--' + wrong.lstrip('-'), options)}. See {help_hint}."
    if match := re.search(r"required: (.*)", message):
        names = re.sub(r"\b[\w-]+\.(?=\w)", "", match[1]).replace("/", ", ")
        return f"{names.rstrip('.')} must be given. See {help_hint}."
    return f"{' '.join(message.split()).rstrip('.')}. See {help_hint}."


def explain_section(message: str) -> str:
    """Return what is wrong with an optional section, from jsonargparse's list of the types that its value may have."""
    reasons = re.findall(r"^ +- (?!Expected a )(.*)$", message, re.MULTILINE)
    return reasons[0] if reasons else " ".join(message.split())


def _explain_value(key: str, message: str, actions: list[Action], help_hint: str) -> str:
    action = next((action for action in actions if action.dest == key), None)
    if action is None:  # an unknown field in a file
        known = [action.dest for action in actions]
        return f"There is no option {key}{did_you_mean(key, known)}. See {help_hint}."
    found = next(filter(None, (pattern.search(message) for pattern in _VALUES)), None)
    if not found and (unknown := re.search(r"There is no option (.*?)\. See ", message)):  # of a section in a mapping
        return f"--{key} has a field that does not exist: {unknown[1]}. See {help_hint}={key.partition('.')[0]}."
    value, expected = found[1].partition("\n  Subclass types")[0].strip() if found else "", describe_type(action)
    if nested := _NESTED_VALUE.search(value):
        if unknown := re.search(r"There is no option [\w.-]+(.*?)\. See ", message):
            return f"There is no option --{key}.{nested[1]}{unknown[1]}. See {help_hint}={key.partition('.')[0]}."
        key, value = f"{key}.{nested[1]}", nested[2].strip("'")
        explained = re.search(r"it must be (.*?)\. See ", message)  # by the parser of the section
        expected = explained[1] if explained else "of another type"
    group = f"={key.partition('.')[0]}" if "." in key else ""
    shown = f" is {' '.join(repr(value).split())}" if found else " is not valid"
    return f"--{key}{shown}; it must be {expected}. See {help_hint}{group}."


def describe_type(action: Action) -> str:
    """Return what a value of an option must be, in words."""
    if action.choices:
        return _one_of(map(str, action.choices))
    if type(action).__name__ == "_ActionConfigLoad":
        return "a YAML file of the options of this group"
    return _describe(getattr(action, "_typehint", None) or action.type)


def _describe(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    origin = get_origin(kind)
    if kind in words:
        return words[kind]
    if origin is Literal:
        return _one_of(map(str, get_args(kind)))
    if origin in (Union, UnionType):
        literals = [choice for part in get_args(kind) if get_origin(part) is Literal for choice in get_args(part)]
        others = [_describe(part) for part in get_args(kind) if get_origin(part) is not Literal]
        return " or ".join([*([_one_of(map(str, literals))] if literals else []), *others])
    if origin is list:
        item = _describe(get_args(kind)[0])
        return f"a list, each item {item}"
    if restrictions := getattr(kind, "_restrictions", None):
        texts = [f"{_BOUNDS[sign]} {bound:,}" for sign, bound in restrictions]
        return f"{_describe(kind._type)} {' and '.join(texts)}"
    return "a section of options, each with a name and a value"


def _one_of(choices: Iterable[str]) -> str:
    return f"one of {', '.join(choices)}"
