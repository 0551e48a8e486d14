"""The options of ``textmill`` and its subcommands. :mod:`textmill.cli.commands` has a function ``<name>_command`` for
each subcommand.

The options that configure the pipeline come from the config dataclasses.
"""

import json
import re
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings  # type: ignore[attr-defined]
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from flows.config import PRESETS, PipelineConfig, StageName, preset_names, preset_path
from flows.posttrain_config import POSTTRAIN_PRESETS, Method, PosttrainConfig, PosttrainStage
from flows.sweep_config import SWEEP_PRESETS
from flows.yaml_files import read_yaml
from lm.common.errors import UserError, did_you_mean
from lm.eval.config import EvaluationConfig, TeachConfig
from lm.inference.config import Quantization, SampleConfig
from lm.train.config import TrainConfig

_ROOT: dict[str, Any] = {"type": str, "default": "artifacts", "help": "directory or URL of all outputs"}
_MODEL: dict[str, Any] = {
    "type": str,
    "default": "",
    "help": "a run below --root, or a local directory in a format of Hugging Face or Meta; default: the latest run",
}
_DEVICE: dict[str, Any] = {"type": str, "default": "auto", "help": "cpu, cuda, mps or auto"}
_QUANTIZE: dict[str, Any] = {
    "choices": get_args(Quantization),
    "default": "none",
    "help": "how weights are stored: none: as saved; bfloat16: 16 bits; int8: 8 bits, on CPUs only. "
    "Fewer bits are faster and a little less exact",
}

_BatchSize = restricted_number_type("BatchSize", int, [(">=", 1), ("<=", 1 << 16)])
_Megabytes = restricted_number_type("Megabytes", int, [(">=", 0), ("<=", 1 << 30)])

_PIPELINE_COMMANDS = {
    "run": "Run the pipeline. Unchanged stages are taken from the cache.",
    "plan": "Show what a run would do and why, without running it.",
    "train-job": "Write the job of the training, for torchrun on machines without Prefect.",
    "profile": "Measure where time and memory of training steps go. The stages before are taken from the cache.",
}
_WHOLE_COMMANDS = ("train-job", "profile")  # of _PIPELINE_COMMANDS: without --until and --refresh

# Security: no value of an option may import code, as jsonargparse's "class_path" does. It names the class of an
# optional section in the same way; those classes alone are allowed.
set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    import_path_denylist=["*"],
    import_path_allowlist=[
        *("lm.model.MoEConfig", "lm.model.moe_config.MoEConfig"),
        *("lm.model.RopeScaling", "lm.model.rope_config.RopeScaling"),
    ],
)


class _Parser(ArgumentParser):
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise UserError with the closest option, instead of printing the usage of 60 options."""
        known = [*self._option_string_actions]
        for command in self._subcommands_action._name_parser_map.values() if self._subcommands_action else ():
            known += command._option_string_actions
        wrong = re.search(r"(?<=unrecognized arguments: )\S+|(?<=option ')[\w.]+", message)
        hint = did_you_mean("--" + wrong.group().partition("=")[0].lstrip("-"), known) if wrong else ""
        if missing := re.search(r"(?<=required: ).*", message):  # named as COMMAND.ARGUMENT
            message = message.replace(missing.group(), re.sub(r"\b\w+\.(?=\w)", "", missing.group()))
        raise UserError(f"{message.rstrip('.')}{hint}. See textmill --help, textmill run --help.")


class _ConfigFile(ActionConfigFile):
    """The option ``--config``. Its errors name the file."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Read the file, and set its options."""
        if not Path(values).is_file():  # a text of options
            super().__call__(parser, cfg, values, option_string)
            return
        read_yaml(Path(values))
        try:
            super().__call__(parser, cfg, values, option_string)
        except UserError as error:
            raise UserError(f"{values}: {error}") from None


def build_parser(
    preset: str = "demo",
    posttrain_preset: str = "demo",
    sweep_base: PipelineConfig | None = None,
    only: str | None = None,
) -> ArgumentParser:
    """Return the parser of all subcommands. Options that a command line omits come from the presets, and those of a
    sweep from its base.

    ``only``: the subcommand that will be parsed. The others have no options of the pipeline then, which saves 0.3 s.
    """
    description = "Turn raw text into a language model, in cached stages."
    parser = _Parser(prog="textmill", description=description, version=_installed_version())
    subcommands = parser.add_subcommands(required=True, dest="command")

    def add(name: str, description: str, **options: Any) -> ArgumentParser:
        subparser = _Parser(description=description, **options)
        subcommands.add_subcommand(name, subparser, help=description)
        return subparser

    def add_flow(name: str, description: str, preset: str, presets: Path, config: type, stages: Any) -> ArgumentParser:
        if only not in (None, name):
            return add(name, description)
        command = add(name, description, default_config_files=[str(preset_path(preset, presets))])
        names = ", ".join(preset_names(presets))
        command.add_argument("--preset", type=str, default="demo", help=f"configuration to start from: {names}")
        command.add_argument("--config", action=_ConfigFile, help="YAML file of options; it overrides the preset")
        command.add_argument("--root", **_ROOT)
        if stages:
            known = ", ".join(get_args(stages))
            command.add_argument("--until", type=str, default="", help=f"last stage to run: {known}")
            command.add_argument("--refresh", type=str, default="", help="stages to run again, separated by commas")
        command.add_class_arguments(config)
        return command

    for name, description in _PIPELINE_COMMANDS.items():
        stages = None if name in _WHOLE_COMMANDS else StageName
        command = add_flow(name, description, preset, PRESETS, PipelineConfig, stages)
        if name == "profile":
            command.add_argument("--steps", type=PositiveInt, default=5, help="training steps to measure")
            command.add_argument("--out", type=str, default="", help="directory of the files; default: below profiles/")

    description = "Fine-tune a trained model on dialogs, preferences or rewards. Unchanged stages are cached."
    posttrain = add_flow("posttrain", description, posttrain_preset, POSTTRAIN_PRESETS, PosttrainConfig, PosttrainStage)
    posttrain.add_argument("--plan", action="store_true", help="show what a run would do and why, without running it")

    sweep = add("sweep", "Train at many points that differ in some options, and compare. Finished points are cached.")
    sweep.add_argument("sweep", type=str, help=f"{', '.join(preset_names(SWEEP_PRESETS))}, or a YAML file")
    sweep.add_argument(
        "--size",
        type=str,
        default="",
        help="such as demo or stories; default: the first size in the file",
    )
    sweep.add_argument("--root", **_ROOT)
    sweep.add_argument("--refresh", type=str, default="", help="stages to run again, separated by commas")
    sweep.add_argument("--plan", action="store_true", help="show what a run would do and why, without running it")
    if only in (None, "sweep"):
        sweep.add_class_arguments(PipelineConfig)
    if sweep_base:
        sweep.set_defaults(_flat(asdict(sweep_base)))

    sample = add("sample", "Sample text from a model.")
    sample.add_argument("--model", **_MODEL)
    sample.add_argument("--root", **_ROOT)
    sample.add_argument("--device", **_DEVICE)
    sample.add_argument("--quantize", **_QUANTIZE)
    sample.add_argument("--prompt", action="append", default=None, type=str, help="text to continue; may be repeated")
    sample.add_class_arguments(SampleConfig, skip={"prompts"})

    chat = add("chat", "Chat with a model. Ctrl-C stops an answer; Ctrl-D or /quit ends the chat.")
    chat.add_argument("--model", **_MODEL)
    chat.add_argument("--root", **_ROOT)
    chat.add_argument("--device", **_DEVICE)
    chat.add_argument("--quantize", **_QUANTIZE)
    chat.add_argument("--system", type=str, default="", help="system message: how the model should answer")
    chat.add_class_arguments(SampleConfig, skip={"prompts", "samples"})

    serve = add("serve", "Serve a model over OpenAI's HTTP API: completions and chat.")
    serve.add_argument("--model", **_MODEL)
    serve.add_argument("--root", **_ROOT)
    serve.add_argument("--device", **_DEVICE)
    serve.add_argument("--quantize", **_QUANTIZE)
    serve.add_argument("--host", type=str, default="127.0.0.1", help="address to listen on")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free port")
    serve.add_argument("--max_batch_size", type=_BatchSize, default=16, help="completions computed at the same time")
    cache_help = "memory for the beginnings of recent prompts, which are not computed again, in MB; 0: none"
    serve.add_argument("--prefix_cache_mb", type=_Megabytes, default=256, help=cache_help)
    guess_help = "tokens to guess in a step from repetitions in a text, at most; 0: none"
    serve.add_argument("--speculative_tokens", type=NonNegativeInt, default=0, help=guess_help)
    key_help = "key that clients must send; the variable TEXTMILL_API_KEY holds it out of sight of other users"
    serve.add_argument("--api_key", type=str, default=None, help=key_help)
    limit_help = "requests of one IP address at a time; 0: no limit"
    serve.add_argument("--max_requests_per_client", type=NonNegativeInt, default=0, help=limit_help)

    evaluate = add("evaluate", "Ask a model the problems of a task, and show how many of its answers are right.")
    evaluate.add_argument("--model", **_MODEL | {"help": f"{_MODEL['help']}; or the URL of a server with OpenAI's API"})
    name_help = "name of the model at the URL; default: that of the only one. OPENAI_API_KEY may hold a key"
    evaluate.add_argument("--model_name", type=str, default="", help=name_help)
    evaluate.add_argument("--root", **_ROOT)
    evaluate.add_argument("--device", **_DEVICE)
    evaluate.add_argument("--quantize", **_QUANTIZE)
    evaluate.add_argument("--out", type=str, default="", help="directory of the responses; default: below evaluations/")
    evaluate.add_class_arguments(EvaluationConfig)

    teach = add("teach", "Ask another model for answers to prompts, and keep the right ones for textmill posttrain.")
    teach.add_class_arguments(TeachConfig)

    tokenizers = add("tokenizers", "Compare tokenizers on texts: compression, speed, vocabulary and split words.")
    tokenizer_help = "a run below --root, a file, or a directory, as NAME or LABEL=NAME; default: the latest run"
    tokenizers.add_argument("tokenizers", nargs="*", type=str, help=tokenizer_help)
    text_help = "text to compare on, as FILE or LABEL=FILE, in any form of --data.train; may be repeated"
    tokenizers.add_argument("--text", action="append", default=None, type=str, required=True, help=text_help)
    tokenizers.add_argument("--root", **_ROOT)
    tokenizers.add_argument("--out", type=str, default="", help="directory of the files; default: tokenizers/")

    export = add("export", "Export a model for transformers, as a Llama, a Qwen3 or a relative, or for llama.cpp.")
    export.add_argument("path", type=str, help="new or empty directory; with --gguf, a new file")
    gguf_help = "write one GGUF file for llama.cpp, with matrices of this type"
    export.add_argument("--gguf", choices=["float32", "bfloat16", "q8_0"], default=None, help=gguf_help)
    export.add_argument("--model", **_MODEL)
    export.add_argument("--root", **_ROOT)

    verify = add("verify", "Check all digests under a root. The exit code is 1 if files are damaged.")
    verify.add_argument("--root", **_ROOT)

    gc = add("gc", "List outputs that no run needs, and what unfinished or replaced stages left.")
    gc.add_argument("--root", **_ROOT)
    gc.add_argument("--delete", action="store_true", help="delete the listed files")

    up = add("up", "Start Prefect's server, the deployments of prefect.yaml and a worker. Ctrl-C stops them.")
    up.add_argument("--port", type=int, default=4200, help="port of the server and its UI, on 127.0.0.1")
    return parser


def _installed_version() -> str:
    try:
        return version("textmill")
    except PackageNotFoundError:
        return "unknown: the package is not installed"


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config by their options."""
    sections = {name: value for name, value in config.items() if isinstance(value, dict)}
    fields = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in config.items() if name not in sections} | fields


def _normalize(parser: ArgumentParser, arguments: list[str]) -> list[str]:
    """Return the arguments as jsonargparse needs them: options with underscores, and as one value the texts after an
    option that takes a list."""
    commands = parser._subcommands_action._name_parser_map if parser._subcommands_action else {}
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


def parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Return the command and its options. Raise UserError if they are invalid."""
    try:
        parsed: Namespace = parser.parse_args(_normalize(parser, arguments))
    except ImportError:
        raise UserError("An option's value has a class_path, which is not allowed.") from None
    except OverflowError as error:
        raise UserError(f"An option's number is out of range: {error}.") from None
    config = {
        **dict.fromkeys(_PIPELINE_COMMANDS, PipelineConfig),
        "posttrain": PosttrainConfig,
        "sweep": PipelineConfig,
    }.get(parsed.command)
    types = get_type_hints(config) if config else {}
    for name in (name for name, kind in types.items() if is_dataclass(kind)):
        if not isinstance(section := parsed[parsed.command].get(name, Namespace()), Namespace):
            raise UserError(f"{name} is {section!r}; it must be a section of options, each with a name and a value.")
    if parsed.command == "posttrain":
        _check_trainings(parsed.posttrain)
    return parsed


def _check_trainings(config: Namespace) -> None:
    """Raise UserError for a mistake in a training of ``posttrain``. Its message names the options of that training."""
    for method in get_args(Method):
        section = "sft" if method == "sft" else f"{method}.train"
        try:
            TrainConfig(**vars(config[section]))
        except UserError as error:
            raise UserError(re.sub(r"\btrain\.", f"{section}.", str(error))) from None
