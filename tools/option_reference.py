"""Reference pages of the documentation in Markdown: the commands and every option, from the parser of the command line.

The text of an option is the docstring line of its field, as ``--help`` shows it.
"""

import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

from flows.config import FlowConfig
from lm.eval.config import EvaluationConfig, TeachConfig
from lm.inference.config import SampleConfig
from textmill.cli.parser import build_parser

_COMMAND_CONFIGS: tuple[type[Any], ...] = (SampleConfig, EvaluationConfig, TeachConfig)
"""Configurations whose fields are options of a command, without the name of a section before them."""
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def option_pages() -> dict[str, str]:
    """Return the pages by their file names: one of all commands, and one of each configuration of a flow."""
    commands = build_parser()._subcommands_action._name_parser_map  # type: ignore[union-attr]
    configs = dict.fromkeys(filter(None, map(_flow_config, commands.values())))
    written: dict[type[Any], str] = {}
    pages = {_page_name(config): _config_page(config, written) for config in configs}
    return {"commands.md": _commands_page(commands), **pages}


def _flow_config(command: Any) -> type[Any] | None:
    """Return the configuration of a flow whose fields are options of a command."""
    names = {action.dest.partition(".")[0] for action in command._actions}
    configs: list[type[Any]] = FlowConfig.__subclasses__()
    return next((config for config in configs if {field.name for field in fields(config)} <= names), None)


def _title(config: type[Any]) -> str:
    return f"options of {config.__name__.removesuffix('Config').lower()}"


def _page_name(config: type[Any]) -> str:
    return f"{_title(config).replace(' ', '-')}.md"


def _commands_page(commands: dict[str, Any]) -> str:
    parts = ["# Commands"]
    for name, command in commands.items():
        config = _flow_config(command)
        documented = {field.name for field in fields(config)} if config else set()
        actions = [action for action in _value_actions(command) if action.dest.partition(".")[0] not in documented]
        positional = "".join(f" {action.dest.upper()}" for action in actions if not action.option_strings)
        parts += [f"## textmill {name} {{#{name}}}", _prose(command.description)]
        parts += [f"```\ntextmill {name}{positional} [options]\n```"]
        parts += [f"It takes the [{_title(config)}]({_page_name(config)}), and:"] if config else []
        for action in actions:
            parts += _option(action, f"{name}-{action.dest}", _find_bounds(action))
    return "\n\n".join(parts) + "\n"


def _value_actions(parser: Any) -> list[Any]:
    """Return the options of a parser that set a value."""
    others = ("_ActionConfigLoad", "_ActionHelpClassPath", "_HelpAction")
    return [action for action in parser._actions if type(action).__name__ not in others]


def _find_bounds(action: Any) -> dict[str, float]:
    """Return the bounds of an option of a command: those of its type, or of its field in a configuration."""
    if restrictions := getattr(getattr(action, "_typehint", None) or action.type, "_restrictions", None):
        return {compare.__name__: bound for compare, bound in restrictions}
    for config in _COMMAND_CONFIGS:
        for field in fields(config):
            if field.name == action.dest and get_type_hints(config)[field.name] == getattr(action, "_typehint", None):
                return dict(field.metadata)
    return {}


def _config_page(config: type[Any], written: dict[type[Any], str]) -> str:
    presets = ", ".join(f"`{name}`" for name in config.preset_names())
    text = (
        "Each field is an option of the command line, a key of a YAML file for `--config`, and a field of Prefect's "
        f"form. A run starts from a preset, by default `demo`. Presets: {presets}."
    )
    sections = _section(config, "", config.load_preset("demo"), written, _page_name(config))
    return "\n\n".join([f"# {_title(config).capitalize()}", text, *sections]) + "\n"


def _section(config: type[Any], prefix: str, demo: Any, written: dict[type[Any], str], page: str) -> Iterator[str]:
    """Write the fields of a section, then its sections. ``demo`` is this section of the preset demo.

    A class that several sections have is written once: ``written`` has the link to it.
    """
    parser = ArgumentParser()
    parser.add_class_arguments(config, prefix or None)
    actions, types = {action.dest: action for action in _value_actions(parser)}, get_type_hints(config)
    sections = []
    for field in fields(config):
        path, value = f"{prefix}.{field.name}".lstrip("."), getattr(demo, field.name, MISSING)
        kind: Any = next(filter(is_dataclass, (types[field.name], *get_args(types[field.name]))), None)
        if path in actions:
            yield from _option(actions[path], path, dict(field.metadata), value)
        sections += [(path, kind, value)] if kind else []
    for path, kind, value in sections:
        yield f"## {path} {{#section-{path}}}"
        yield _prose(inspect.getdoc(kind) or "")
        if kind not in written:
            written[kind] = f"[{path}]({page}#section-{path})"
            yield from _section(kind, path, value, written, page)
            continue
        yield f"Its options are those of {written[kind]}."
        default, shared = kind(), fields(kind) if is_dataclass(value) else ()
        values = [(field.name, getattr(value, field.name)) for field in shared]
        changed = [f"`{name}` to {_value(new)}" for name, new in values if new != getattr(default, name)]
        if changed:
            yield f"The preset `demo` sets {', '.join(changed)}."


def _option(action: Any, anchor: str, bounds: dict[str, float], demo: Any = MISSING) -> list[str]:
    """Write an option: its name, type, bounds and default, and its help."""
    facts = [_type_name(action)]
    facts += [f"{_SIGNS[name]} {bound}" for name, bound in bounds.items() if name in _SIGNS and math.isfinite(bound)]
    if action.option_strings and action.nargs != 0:
        facts.append(f"default {_value(action.default)}")
    if demo is not MISSING and not is_dataclass(demo) and demo != action.default:
        facts.append(f"in the preset `demo` {_value(demo)}")
    name = action.option_strings[0] if action.option_strings else action.dest.upper()
    return [f"### `{name}` {{#{anchor}}}", f"*{', '.join(facts)}*", _prose(inspect.cleandoc(action.help))]


def _value(value: Any) -> str:
    if value in (None, "", [], {}, "==SUPPRESS=="):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type_name(action: Any) -> str:
    if action.choices:
        return " or ".join(map(str, action.choices))
    return "flag" if action.nargs == 0 else _describe(getattr(action, "_typehint", None) or action.type or str)


def _describe(hint: Any) -> str:
    """Return a type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(arguments)
    if origin in (list, dict):
        return f"{'list' if origin is list else 'names, each with a value'} of {_describe(arguments[-1])}"
    if arguments:  # a union
        return " or ".join(_describe(member) for member in arguments if member is not NoneType)
    if inspect.isfunction(hint):  # that parses a text
        return hint.__name__.replace("_", " ")
    words = {bool: "true or false", int: "integer", float: "number", str: "text"}
    return next((word for base, word in words.items() if issubclass(hint, base)), f"section of {hint.__name__}")


def _prose(text: str) -> str:
    """Return the text of a docstring as Markdown: outside code, no character is HTML or emphasis."""
    parts = re.split(r"(``.+?``|`.+?`)", text, flags=re.DOTALL)
    return "".join(part if part.startswith("`") else re.sub(r"([<*\[])", r"\\\1", part) for part in parts)
