"""Every option with one of three bad values gives one line that names the option, without words of the parser."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any
from zlib import crc32

import pytest

from lm.common.errors import UserError
from textmill.cli.help import format_command_help
from textmill.cli.parser import build_parser, parse

PARSER_WORDS = re.compile(r"<class|typing\.|Literal\[|jsonargparse|Namespace|Parser key|NoneType|Union|subcommand|\n")
REQUIRED = {
    "sweep": ["learning-rate"],
    "explain": ["a text"],
    "export": ["there"],
    "compare": ["a"],
    "tokenizers": ["--text", "a.txt"],
    "evaluate": ["--task", "words"],
    "teach": ["--model", "m", "--url", "http://u"],
    "dialogs": ["--show", "a.jsonl"],
}


@cache
def parser_of(command: str) -> Any:
    return build_parser(only=command)


@cache
def commands() -> dict[str, Any]:
    parsers: dict[str, Any] = parser_of("none")._subcommands_action._name_parser_map
    return parsers


def options_of(command: str) -> Iterator[Any]:
    parser = parser_of(command)._subcommands_action._name_parser_map[command]
    for action in parser._actions:
        is_of_run = command in ("plan", "deploy", "train-job", "profile", "sweep") and "." in action.dest
        if action.option_strings and action.dest not in ("help", "print_config", "config") and not is_of_run:
            yield action


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(commands()))
def test_every_option_with_a_bad_value_is_explained_in_one_line(command: str) -> None:
    for action in options_of(command):
        option = next(option for option in action.option_strings if option.startswith("--"))
        bad = ("{a: [", "?*", "-1.5e3x")[crc32(option.encode()) % 3]
        arguments = [command, *REQUIRED.get(command, []), f"{option}={bad}"]
        try:
            parse(parser_of(command), arguments)
        except UserError as error:
            message = str(error)
            assert not PARSER_WORDS.search(message), (arguments, message)
            assert action.dest.rpartition(".")[2] in message, (arguments, message)
            assert len(message) < 400, message
        else:
            kind = getattr(action, "_typehint", None) or action.type
            assert "str" in str(kind), f"{arguments} is taken, although it must be {kind}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--train.steps", "many"], "it must be a whole number. See textmill run --help=train."),
        (["run", "--train.patience", "x"], "--train.patience is 'x'; it must be a whole number or null."),
        (["run", "--data.page_text", "x"], "--data.page_text is 'x'; it must be one of main, whole."),
        (["run", "--model.qk_norm", "x"], "--model.qk_norm is 'x'; it must be true or false."),
        (["run", "--model.moe.num_experts", "x"], "--model.moe.num_experts is 'x'; it must be a whole number."),
        (["run", "--execution.parallel", "q"], "it must be one of auto, none, ddp, zero1, zero2, fsdp."),
        (["posttrain", "--methods", "x"], "it must be a list, each item one of sft, distill, preference,"),
        (["serve", "--max_batch_size", "0"], "it must be a whole number of at least 1 and of at most 65,536."),
        (["sample", "--quantize", "x"], "is 'x'; it must be one of none, bfloat16, int8. See textmill sample"),
        (["run", "--until"], "--until needs a value. See textmill run --help."),
        (["run", "--data.mix", "{a: {wieght: 1}}"], "--data.mix has a field that does not exist: wieght (did you mean"),
        (["run", "--data.mix", "{a: 3}"], "--data.mix is '3'; it must be a section of options, each with a name and"),
        (["run", "--data.mix", "{a: {class_path: os.system}}"], "--data.mix is not valid; it must be a section"),
        (["run", "more"], "'more' is not expected here: an option begins with --."),
        (["run", "--chunk", "5"], "--chunk is '5'; it must be a YAML file of the options of this group."),
        (["tokenizers"], "text must be given"),
    ],
)  # fmt: skip
def test_errors_say_what_a_value_must_be(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(parser_of(arguments[0]), arguments)
    assert message in str(error.value)


@pytest.mark.parametrize("command", sorted(commands()))
def test_help_fits_a_terminal(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    parser = parser_of(command)._subcommands_action._name_parser_map[command]
    short, full = (format_command_help(parser, command, topic) for topic in ("", "all"))
    assert len(short.splitlines()) <= (40 if command in ("run", "plan") else 60)
    for line in (*short.splitlines(), *full.splitlines()):
        assert len(line) <= 80, line
    for action in options_of(command):
        if type(action).__name__ != "_ActionConfigLoad":
            assert f"{action.option_strings[0]}" in full
    assert not PARSER_WORDS.search(full.replace("\n", " "))


def test_a_group_of_options_has_its_own_help() -> None:
    parser = parser_of("run")._subcommands_action._name_parser_map["run"]
    text = format_command_help(parser, "run", "train")
    assert "--train.steps" in text and "--model.d_model" not in text
    with pytest.raises(UserError, match=r"no help of 'trian' \(did you mean 'train'\?\)"):
        format_command_help(parser, "run", "trian")
