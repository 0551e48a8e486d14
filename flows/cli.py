"""The command line: ``textmill run``, ``plan``, ``sample``, ``chat``, ``serve``, ``export``, ``verify``, ``gc`` and
``up``.

All that configures the work comes from the dataclasses.
"""

import argparse
import os
import re
import signal
import sys
from dataclasses import replace
from typing import NoReturn, cast, get_args

# Prefect reads its settings when it is imported. Its own lines are for its UI; the console shows the project's.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
# A busy machine needs longer than the default 20 s to start the ephemeral server.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings  # type: ignore[attr-defined]
from jsonargparse.typing import PositiveInt

from flows.chat import chat_command
from flows.config import PRESETS, PipelineConfig, preset_path
from flows.console import (
    export_command,
    gc_command,
    plan_command,
    run_command,
    sample_command,
    verify_command,
)
from flows.pipeline import StageName
from flows.runs import end_without_server
from flows.serve import serve_command
from flows.stop import STOPPED, Terminated, terminate
from flows.up import start_prefect
from lm import dialog
from lm.errors import UserError, nearest
from lm.sampling import SampleConfig

# No value of an option may name something to import, as "class_path" would.
set_parsing_settings(docstring_parse_attribute_docstrings=True, import_path_denylist=["*"])


class _Parser(ArgumentParser):
    """Answers a mistake with one message instead of the usage of 60 options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        known = [option for option in self._option_string_actions if "." in option]
        for command in self._subcommands_action._name_parser_map.values() if self._subcommands_action else ():
            known += command._option_string_actions
        wrong = re.search(r"(?<=unrecognized arguments: )\S+|(?<=option ')[\w.]+", message)
        hint = nearest("--" + wrong.group().partition("=")[0].lstrip("-"), known) if wrong else ""
        raise UserError(f"{message}{hint}. See textmill --help, textmill run --help.")


def build_parser(preset: str = "demo") -> ArgumentParser:
    """The parser of all commands; the options of ``run`` and ``plan`` default to the preset's."""
    parser = _Parser(prog="textmill", description="From raw text to a language model, stage by cached stage.")
    commands = parser.add_subcommands(required=True, dest="command")
    commands.add_subcommand("run", _run_parser(preset), help="run the pipeline, taking from the cache what is there")
    commands.add_subcommand("plan", _run_parser(preset), help="tell what a run would do, and why, without running it")
    sample = _model_parser("Sample text from the model of the latest run.")
    sample.add_argument("--prompt", action="append", default=None, type=str, help="text to go on from; may be repeated")
    sample.add_class_arguments(SampleConfig, skip={"prompts"})
    commands.add_subcommand("sample", sample, help="sample text from the model of the latest run")
    chat = _model_parser("Chat with the model of the latest run. Ctrl-C stops an answer; Ctrl-D or /quit ends.")
    chat.add_class_arguments(SampleConfig, skip={"prompts", "samples"})
    commands.add_subcommand("chat", chat, help="chat with the model of the latest run, in the terminal")
    serve = _model_parser("Serve the model of the latest run by OpenAI's HTTP API: completions and chat.")
    serve.add_argument("--host", type=str, default="127.0.0.1", help="address to listen on; anyone there may ask")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 for any that is free")
    serve.add_argument("--max-batch-size", type=PositiveInt, default=16, help="completions computed side by side")
    commands.add_subcommand("serve", serve, help="serve the model of the latest run by OpenAI's HTTP API")
    export = _Parser(description="Write the model of the latest run for Hugging Face's transformers, as a Llama.")
    export.add_argument("directory", type=str, help="a new or an empty directory")
    export.add_argument("--root", type=str, default="artifacts", help="directory or URL that the outputs are below")
    commands.add_subcommand("export", export, help="write the model of the latest run for Hugging Face's transformers")
    verify = _Parser(description="Read all that is below a root and list what is damaged, unfinished or orphaned.")
    verify.add_argument("root", type=str, nargs="?", default="artifacts", help="directory or URL of the outputs")
    commands.add_subcommand("verify", verify, help="check all digests below a root; exits with 1 if some are wrong")
    gc = _Parser(description="List what no run's record needs, superseded and unfinished attempts; --delete it.")
    gc.add_argument("root", type=str, nargs="?", default="artifacts", help="directory or URL of the outputs")
    gc.add_argument("--delete", action="store_true", help="delete what is listed")
    commands.add_subcommand("gc", gc, help="list, or delete, what no run needs below a root")
    up = _Parser(description="Start Prefect's server, a work pool, the deployments of prefect.yaml and a worker.")
    up.add_argument("--port", type=int, default=4200, help="port of the server and its UI, on 127.0.0.1")
    commands.add_subcommand("up", up, help="start Prefect's server, the deployments and a worker; Ctrl-C stops them")
    return parser


def _model_parser(description: str) -> ArgumentParser:
    parser = _Parser(description=description)
    parser.add_argument("--root", type=str, default="artifacts", help="directory or URL that the outputs are below")
    parser.add_argument("--device", type=str, default="auto", help="cpu, cuda, mps or auto")
    return parser


def _run_parser(preset: str) -> ArgumentParser:
    presets = ", ".join(sorted(path.stem for path in PRESETS.glob("*.yaml")))
    parser = _Parser(
        description=f"The stages: {', '.join(get_args(StageName))}.", default_config_files=[str(preset_path(preset))]
    )
    parser.add_argument("--preset", type=str, default="demo", help=f"configuration to start from: {presets}")
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file of options, over the preset's")
    parser.add_argument("--root", type=str, default="artifacts", help="directory or URL that the outputs go below")
    parser.add_argument("--until", type=str, default="", help="last stage to run; default: sample")
    parser.add_argument("--refresh", type=str, default="", help="stages to make anew, with commas between")
    parser.add_class_arguments(PipelineConfig)
    return parser


def _preset_named(arguments: list[str]) -> str:
    """The preset is needed before the rest can be parsed: its values are the defaults."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?", const="demo", default="demo")
    return str(parser.parse_known_args(arguments)[0].preset)


def _stages(names: str) -> tuple[StageName, ...]:
    known = get_args(StageName)
    stages = [name.strip() for name in names.split(",") if name.strip()]
    for name in stages:
        if name not in known:
            raise UserError(f"There is no stage {name!r}{nearest(name, known)}. Stages: {', '.join(known)}.")
    return cast(tuple[StageName, ...], tuple(stages))


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns 0 for success, 1 where ``verify`` found damage, 2 for a user's mistake (one message), 130
    when stopped by Ctrl-C, 143 by SIGTERM. A fault of the project itself passes on, with its traceback."""
    signal.signal(signal.SIGTERM, terminate)
    code = _told(sys.argv[1:] if arguments is None else arguments)
    end_without_server(code)
    return code


def _told(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"textmill: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(STOPPED, file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130


def parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """The command and its options; raises UserError for what they cannot be."""
    try:
        parsed: Namespace = parser.parse_args(arguments)
    except ImportError:
        raise UserError("An option's value names something to import (class_path), which none may.") from None
    except OverflowError as error:
        raise UserError(f"A number among the options is out of all bounds: {error}.") from None
    for name in PipelineConfig.__dataclass_fields__:
        if not isinstance(section := parsed[parsed.command].get(name, Namespace()), Namespace):
            raise UserError(f"{name} is {section!r}; it must be a section of options, each with a name and a value.")
    return parsed


def _dispatch(arguments: list[str]) -> int:
    preset = _preset_named(arguments)
    parser = build_parser(preset)
    parsed = parse(parser, arguments)
    options: Namespace = parser.instantiate(parsed)[parsed.command]
    if options.get("preset", preset) != preset:  # from a file, or an abbreviated option: too late for its defaults
        raise UserError(f"Name the preset on the command line: --preset {options.preset}")
    if parsed.command == "up":
        start_prefect(options.port)
    elif parsed.command in ("sample", "chat"):
        sampling = SampleConfig(
            **{name: options[name] for name in SampleConfig.__dataclass_fields__ if name in options}
        )
        if parsed.command == "chat":
            chat_command(options.root, replace(sampling, stop=[*sampling.stop, dialog.STOP]), options.device)
        else:
            sampling = replace(sampling, prompts=options.prompt or sampling.prompts)
            sample_command(options.root, sampling, options.device)
    elif parsed.command == "verify":
        return verify_command(options.root)
    elif parsed.command == "gc":
        gc_command(options.root, options.delete)
    elif parsed.command == "export":
        export_command(options.root, options.directory)
    elif parsed.command == "serve":
        serve_command(options.root, options.host, options.port, options.max_batch_size, options.device)
    else:
        until, refresh = _stages(options.until), _stages(options.refresh)
        config = PipelineConfig(**{name: options[name] for name in PipelineConfig.__dataclass_fields__})
        command = run_command if parsed.command == "run" else plan_command
        command(config, options.root, until[-1] if until else None, refresh)
    return 0
