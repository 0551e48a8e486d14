"""The options of ``textmill`` and its subcommands. A subcommand has a function ``<name>_command`` in
:mod:`textmill.cli.run` if it starts a flow, and else in :mod:`textmill.cli.tools`.

The options that configure the pipeline come from the config dataclasses.
"""

import argparse
import re
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace, set_parsing_settings  # type: ignore[attr-defined]
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from flows.config import FlowConfig, PipelineConfig, StageName, flat_fields, read_yaml
from flows.curate import CurateConfig, CurateStage
from flows.posttrain import PosttrainConfig, PosttrainStage
from flows.prefect_support.deployments import LOCAL_POOL
from flows.sweep_config import SweepConfig
from lm.common.errors import UserError, did_you_mean
from lm.eval.config import EvaluationConfig, TeachConfig
from lm.inference.config import Pooling, Quantization, SampleConfig
from lm.posttrain.config import Method
from lm.train.config import TrainConfig, fitting_warmup
from textmill.cli.base_config import read_last_config, read_sweep_base
from textmill.cli.completion import Shell
from textmill.cli.help import OVERVIEW, HelpFormatter, format_command_help
from textmill.cli.list_options import join_lists
from textmill.cli.memory_size import memory_size
from textmill.cli.parse_errors import explain, explain_section
from textmill.cli.terminal import print_message

_SHARED_OPTIONS: dict[str, dict[str, Any]] = {
    "root": {"type": str, "default": "artifacts", "help": "directory or URL of all outputs"},
    "model": {
        "type": str,
        "default": "",
        "help": "a run below --root, a directory of Hugging Face, peft or Meta, or ORG/NAME in the hub's local cache; "
        "default: the latest run",
    },
    "device": {"type": str, "default": "auto", "help": "cpu, cuda, mps or auto"},
    "quantize": {
        "choices": get_args(Quantization),
        "default": "none",
        "help": "how weights are stored: none: as saved; bfloat16: 16 bits; int8: 8 bits, on CPUs only. "
        "Fewer bits are faster and a little less exact",
    },
    "refresh": {"type": str, "default": "", "help": "stages to run again, separated by commas"},
    "plan": {"action": "store_true", "help": "show what a run would do and why, without running it"},
    "again": {"action": "store_true", "help": "start from the options of the last run; the default at a terminal"},
    "fresh": {"action": "store_true", "help": "start from the preset, not from the options of the last run"},
}

_PIPELINE_COMMANDS = {
    "run": "Run the pipeline. Unchanged stages are taken from the cache.",
    "plan": "Show what a run would do and why, without running it.",
    "deploy": "Have Prefect's server run the pipeline, on a schedule or on request.",
    "train-job": "Write the job of the training, for torchrun on machines without Prefect.",
    "profile": "Measure where time and memory of training steps go. The stages before are taken from the cache.",
}

# Security: no value of an option may import code, as jsonargparse's "class_path" does. It names the class of an
# optional section, and of a source of ``data.mix``, in the same way; those classes alone are allowed.
set_parsing_settings(
    docstring_parse_attribute_docstrings=True,
    import_path_denylist=["*"],
    import_path_allowlist=[
        *("lm.model.MoEConfig", "lm.model.config.MoEConfig"),
        *("lm.curate.RulesConfig", "lm.curate.config.RulesConfig"),
        *("lm.model.RopeScaling", "lm.model.config.RopeScaling"),
        "lm.text.config.MixSource",
    ],
)


class _Parser(ArgumentParser):
    only: str | None = None
    """Command that will be parsed, of the parser of all commands."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise UserError with what the value must be or the closest option, instead of printing the usage."""
        parser = _commands(self).get(self.only or "", self)
        raise UserError(explain(message, parser._actions, f"{parser.prog.replace(' [options]', '')} --help"))

    def option(self, name: str, default: Any, help_text: str, **settings: Any) -> None:
        """Add an option. Its type is that of the default, unless ``settings`` name another one."""
        self.add_argument(f"--{name}", **{"type": type(default), "default": default, "help": help_text} | settings)

    def share(self, *names: str) -> None:
        """Add options that several commands have."""
        for name in names:
            self.add_argument(f"--{name}", **_SHARED_OPTIONS[name])


class _ConfigFile(ActionConfigFile):
    """The option ``--config``. Its errors name the file."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Read the file, and set its options."""
        if not Path(values).is_file():  # a text of options
            if "\n" not in values and ": " not in values:
                raise UserError(f"The file {values} of --config does not exist.")
            super().__call__(parser, cfg, values, option_string)
            return
        read_yaml(Path(values))
        try:
            super().__call__(parser, cfg, values, option_string)
        except UserError as error:
            raise UserError(f"{values}: {error}") from None


def build_parser(preset: str = "demo", base: PipelineConfig | None = None, only: str | None = None) -> _Parser:
    """Return the parser of all subcommands. Options that a command line omits come from ``base``, the configuration of
    a sweep or of the last run; without it, from the preset.

    ``only``: the subcommand that will be parsed. The others have no options of the pipeline then, which saves 0.3 s.
    ``preset`` is one of post-training only if this is ``posttrain``.
    """
    description = "Turn raw text into a language model, in cached stages."
    try:
        installed = version("textmill")
    except PackageNotFoundError:
        installed = "unknown: the package is not installed"
    parser = _Parser(prog="textmill", description=description, version=installed, formatter_class=HelpFormatter)
    parser.only = only
    subcommands = parser.add_subcommands(required=True, dest="command")

    def add(name: str, description: str, *shared: str, **options: Any) -> _Parser:
        subparser = _Parser(description=description, **options)
        subcommands.add_subcommand(name, subparser, help=description)
        subparser.share(*shared)
        return subparser

    def add_flow(name: str, description: str, preset: str, config: type[FlowConfig], stages: Any) -> _Parser:
        if only not in (None, name):
            return add(name, description)
        command = add(name, description, default_config_files=[] if base else [str(config.preset_path(preset))])
        presets = "; ".join(f"{name}: {purpose}" for name, purpose in config.PRESET_TEXTS.items())
        command.option("preset", "demo", f"configuration to start from. {presets}")
        command.add_argument("--config", action=_ConfigFile, help="YAML file of options; it overrides the preset")
        command.share("root")
        if stages:
            command.option("until", "", f"last stage to run: {', '.join(get_args(stages))}")
            command.share("refresh")
        command.add_class_arguments(config)
        if base:
            command.set_defaults(flat_fields(asdict(base)))
        return command

    for name, description in _PIPELINE_COMMANDS.items():
        stages = StageName if name in ("run", "plan", "deploy") else None
        command = add_flow(name, description, preset, PipelineConfig, stages)
        if name in ("run", "plan"):
            command.share("again", "fresh")
        if name == "profile":
            command.option("steps", 5, "training steps to measure", type=PositiveInt)
            command.option("out", "", "directory of the files; default: below profiles/")
        if name == "deploy":
            if action := command._option_string_actions.get("--name"):
                action.help = "name of the deployment, and of its runs"
            command.option(
                "cron", "", 'schedule, such as "0 3 * * *" for 3:00 every day; default: runs on request only'
            )
            command.option("timezone", "UTC", "time zone of the schedule, such as Europe/Berlin")
            command.option("on", "", "name of an event that starts a run too, such as corpus.new")
            evaluate_help = "task on which each trained model is evaluated, such as addition:1-3 or gsm8k=FILE"
            command.option("evaluate", "", evaluate_help)
            command.option("alert", "", "URL of a webhook that is called if a loss is not finite")
            command.option("pool", LOCAL_POOL, "work pool whose workers run it; it is created if it is missing")

    explained = "Show what each rule of the filter makes of a document: its value, the limit, and whether it passes."
    command = add_flow("explain", explained, preset, PipelineConfig, None)
    command.add_argument("text", type=str, help="a text in quotes, or a file or URL in any form of --data.train")
    command.option("document", 1, "number of the document in the file", type=PositiveInt)

    description = "Fine-tune a trained model on dialogs, preferences or rewards. Unchanged stages are cached."
    posttrain_preset = preset if only == "posttrain" else "demo"
    posttrain = add_flow("posttrain", description, posttrain_preset, PosttrainConfig, PosttrainStage)
    posttrain.share("plan")

    description = "Filter text, remove copies, and write it as JSON Lines or Parquet. Unchanged stages are cached."
    curate = add_flow("curate", description, preset if only == "curate" else "demo", CurateConfig, CurateStage)
    curate.share("plan")

    sweep = add("sweep", "Train at many points that differ in some options, and compare. Finished points are cached.")
    sweep.add_argument("sweep", type=str, help=f"{', '.join(SweepConfig.preset_names())}, or a YAML file")
    sweep.option("size", "", "such as demo or stories; default: the first size in the file")
    sweep.option("variant", "", "with gate: YAML file of the options to try, such as train.beta2: 0.99")
    sweep.option("seeds", None, "with gate: number of seeds; default: that of the file", type=PositiveInt | None)
    speedrun = add("speedrun", "Train a recipe again, with several seeds, and say whether its record holds.")
    speedrun.option("size", "", "name of the record; default: demo, which takes minutes")
    for command in (sweep, speedrun):
        command.share("root", "refresh", "plan")
        if only in (None, "sweep", "speedrun"):
            command.add_class_arguments(PipelineConfig)
        if base and only in ("sweep", "speedrun"):
            command.set_defaults(flat_fields(asdict(base)))

    sample = add("sample", "Sample text from a model.", "model", "root", "device", "quantize")
    sample.option("prompt", None, "text to continue; may be repeated", type=str, action="append")
    sample.add_class_arguments(SampleConfig, skip={"prompts"})

    description = "Chat with a model. Ctrl-C stops an answer; Ctrl-D or /quit ends the chat."
    chat = add("chat", description, "model", "root", "device", "quantize")
    chat.option("system", "", "system message: how the model should answer")
    chat.add_class_arguments(SampleConfig, skip={"prompts", "samples"})

    description = "Serve a model over OpenAI's HTTP API: completions and chat."
    serve = add("serve", description, "model", "root", "device", "quantize")
    batch_size = restricted_number_type("BatchSize", int, [(">=", 1), ("<=", 1 << 16)])
    megabytes = restricted_number_type("Megabytes", int, [(">=", 0), ("<=", 1 << 30)])
    serve.option("host", "127.0.0.1", "address to listen on")
    serve.option("port", 8000, "port to listen on; 0: any free port")
    serve.option("max_batch_size", 16, "completions computed at the same time", type=batch_size)
    context_help = "max tokens of a prompt and its completion; default: the context of the model"
    serve.option("max_context", None, context_help, type=PositiveInt | None)
    memory_help = "memory for the keys and values of completions, as 4GB or 512MiB; default: half of what is free"
    serve.option("kv_memory", None, memory_help, type=memory_size)
    cache_help = (
        "part of it in MB that keeps recent prompts, so that their beginnings are computed once; 0 turns it off"
    )
    serve.option("prefix_cache_mb", 256, cache_help, type=megabytes)
    guess_help = "max tokens guessed per step by prompt lookup; 0 turns it off"
    serve.option("speculative_tokens", 0, guess_help, type=NonNegativeInt)
    key_help = "key that clients must send; the variable TEXTMILL_API_KEY holds it out of sight of other users"
    serve.option("api_key", None, key_help, type=str)
    limit_help = "requests of one IP address at a time; 0: no limit"
    serve.option("max_requests_per_client", 0, limit_help, type=NonNegativeInt)
    name_help = "name of the model for clients, which may also call it textmill; default: its run or directory"
    serve.option("served_model_name", "", name_help)
    adapters_help = (
        "adapters of the model that clients choose by model name: NAME=DIR, as peft and textmill export write"
    )
    serve.option("adapters", [], adapters_help, type=list[str])
    origin_help = 'web pages that may use the server, as https://app.example.com; "*": all. Default: its own page'
    serve.option("allowed_origins", [], origin_help, type=list[str])
    pooling_help = "the embedding of a text: the hidden state of its last token, or the mean over its tokens"
    serve.add_argument("--pooling", choices=get_args(Pooling), default="last", help=pooling_help)

    evaluate = add("evaluate", "Ask a model the problems of a task, and show how many of its answers are right.")
    model_help = f"{_SHARED_OPTIONS['model']['help']}; or the URL of a server with OpenAI's API"
    evaluate.add_argument("--model", **_SHARED_OPTIONS["model"] | {"help": model_help})
    name_help = "name of the model at the URL; default: that of the only one. OPENAI_API_KEY may hold a key"
    evaluate.option("model_name", "", name_help)
    evaluate.share("root", "device", "quantize")
    evaluate.option("out", "", "directory of the responses; default: below evaluations/")
    evaluate.add_class_arguments(EvaluationConfig)

    teach = add("teach", "Ask another model for answers to prompts, and keep the right ones for textmill posttrain.")
    teach.add_class_arguments(TeachConfig)

    dialogs = add("dialogs", "Show the first rows of fine-tuning data as the model will see them.", "root")
    dialogs.option("show", "", "file of dialogs or preferences, in any form of --dialogs.train", required=True)
    dialogs.option("rows", 3, "rows to show", type=PositiveInt)
    model_help = "a run below --root, or a directory, to count tokens and compare with its context; default: no model"
    dialogs.option("model", "", model_help)

    tokenizers = add("tokenizers", "Compare tokenizers on texts: compression, speed, vocabulary and split words.")
    tokenizer_help = "a run below --root, a file, or a directory, as NAME or LABEL=NAME; default: the latest run"
    tokenizers.add_argument("tokenizers", nargs="*", type=str, help=tokenizer_help)
    text_help = "text to compare on, as FILE or LABEL=FILE, in any form of --data.train; may be repeated"
    tokenizers.option("text", None, text_help, type=str, action="append", required=True)
    tokenizers.share("root")
    tokenizers.option("out", "", "directory of the files; default: tokenizers/")
    flops_help = "FLOPs, such as 1e14: train a small model with each tokenizer for bits per byte; default: no training"
    flops = restricted_number_type("FLOPs", float, [(">", 0), ("<", float("inf"))])
    tokenizers.option("train_flops", None, flops_help, type=flops | None)
    train_help = "with --train_flops: text to train on, in any form of --data.train; may be repeated"
    tokenizers.option("train_text", None, train_help, type=str, action="append")
    tokenizers.option("seeds", 1, "with --train_flops: models for each tokenizer", type=PositiveInt)

    export = add("export", "Export a model for transformers, as a Llama, a Qwen3 or a relative, or for llama.cpp.")
    export.add_argument("path", type=str, help="new or empty directory; with --gguf, a new file")
    gguf_help = "write one GGUF file for llama.cpp, with matrices of this type"
    export.add_argument("--gguf", choices=["float32", "bfloat16", "q8_0"], default=None, help=gguf_help)
    fuse_help = "write the whole model if it is an adapter; by default, the adapter alone, in peft's format"
    export.add_argument("--fuse_adapter", action="store_true", help=fuse_help)
    export.share("model", "root")

    runs = add("runs", "List the runs below a root, rename one, or delete one with what no other run needs.", "root")
    action_help = "list (default); rename RUN NAME; delete RUN"
    runs.add_argument("action", nargs="?", default="list", choices=["list", "rename", "delete"], help=action_help)
    runs.add_argument("names", nargs="*", type=str, help="the run, as the list names it, and its new name")
    runs.add_argument("--json", action="store_true", help="print the list as JSON")
    runs.add_argument("--yes", action="store_true", help="delete without asking")
    compare = add(
        "compare", "Draw the losses of runs over steps, tokens and time, and print their last figures.", "root"
    )
    compare.add_argument("runs", nargs="+", type=str, metavar="RUN", help="a run below --root")
    compare.option("out", "", "directory of the figure; default: comparison/")

    add("verify", "Check all digests under a root. The exit code is 1 if files are damaged.", "root")
    gc = add("gc", "List outputs that no run needs, and what unfinished or replaced stages left.", "root")
    gc.add_argument("--delete", action="store_true", help="delete the listed files")

    completion = add("completion", "Print a script that completes commands and options in bash, zsh or fish.")
    completion.add_argument("shell", choices=get_args(Shell), help="your shell; docs/own-text.md says where it goes")

    up = add("up", "Start Prefect's server, the deployments and a worker. Ctrl-C stops them.")
    up.option("port", 4200, "port of the server and its UI, on 127.0.0.1")
    return parser


def _commands(parser: ArgumentParser) -> dict[str, _Parser]:
    return parser._subcommands_action._name_parser_map if parser._subcommands_action else {}


def parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Return the command and its options. Raise UserError if they are invalid."""
    try:
        parsed: Namespace = parser.parse_args(join_lists(arguments, _commands(parser)))
    except ImportError:
        raise UserError("An option's value has a class_path; that is not allowed.") from None
    except OverflowError as error:
        raise UserError(f"An option's number is out of range: {error}.") from None
    options = parsed[parsed.command]
    configs: dict[str, Any] = dict.fromkeys((*_PIPELINE_COMMANDS, "sweep", "speedrun", "explain"), PipelineConfig)
    configs |= {"posttrain": PosttrainConfig, "curate": CurateConfig}
    types = get_type_hints(configs[parsed.command]) if parsed.command in configs else {}
    for name in (name for name, kind in types.items() if is_dataclass(kind)):
        if not isinstance(section := options.get(name, Namespace()), Namespace):
            raise UserError(f"{name} is {section!r}; it must be a section of options, each with a name and a value.")
    for section in _training_sections(parsed.command):
        _fit_warmup(_commands(parser)[parsed.command], options, section)
    for section in _training_sections(parsed.command) if parsed.command == "posttrain" else ():
        try:
            TrainConfig(**vars(options[section]))
        except UserError as error:  # name the options of this training
            raise UserError(re.sub(r"\btrain\.", f"{section}.", str(error))) from None
    return parsed


def _training_sections(command: str) -> list[str]:
    """Return the groups of options of the trainings of a command."""
    if command == "posttrain":
        return ["sft" if method == "sft" else f"{method}.train" for method in get_args(Method)]
    return ["train"] if command in _PIPELINE_COMMANDS else []


def _fit_warmup(parser: ArgumentParser, options: Namespace, section: str) -> None:
    """Shrink a warm-up that the command line did not change if it no longer fits into the steps, and say so."""
    train = options[section]
    if train.warmup_steps < train.steps and train.schedule != "wsd":
        return
    base = parser.get_defaults()[section]
    warmup = fitting_warmup(vars(train), vars(base))
    if train.steps > 0 and train.warmup_steps == base.warmup_steps != warmup:
        print_message(f"{section}.warmup_steps: {train.warmup_steps} → {warmup}, as steps is {train.steps}.")
        train.warmup_steps = warmup


def parse_command(arguments: list[str]) -> tuple[str, Namespace]:
    """Return the command that a command line names, and its options. Raise UserError if they are invalid."""
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(f"The working directory cannot be used: {error.strerror}. Change to another one.") from None
    if not arguments or arguments[0] in ("-h", "--help"):
        print(OVERVIEW, end="")
        raise SystemExit(0)
    command = arguments[0]
    # The preset, or the configuration to start from, is needed to build the parser.
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", nargs="?", const="demo")
    early.add_argument("--root", nargs="?", const="", default=_SHARED_OPTIONS["root"]["default"])
    for flag in ("--again", "--fresh"):
        early.add_argument(flag, action="store_true")
    known, others = early.parse_known_args(arguments[1:])
    preset = str(known.preset or "demo")
    topics = [other.partition("=")[2] for other in others if other in ("-h", "--help") or other.startswith("--help=")]
    base = read_sweep_base(arguments) if command in ("sweep", "speedrun") else None
    if command in ("run", "plan") and not topics:
        base = read_last_config(known.root, known.again, known.fresh, known.preset)
    parser = build_parser(preset, base, command)
    if not command.startswith("-") and command not in (commands := _commands(parser)):
        raise UserError(f"There is no command {command!r}{did_you_mean(command, [*commands])}. See textmill --help.")
    if topics:
        print(format_command_help(commands[command], command, topics[0]), end="")
        raise SystemExit(0)
    parsed = parse(parser, arguments)
    try:
        options: Namespace = parser.instantiate(parsed)[parsed.command]
    except ValueError as error:  # from an optional section; UserError is no ValueError
        raise UserError(explain_section(str(error))) from None
    if options.get("preset", preset) != preset:  # named in a file or by an abbreviation, which ``early`` ignores
        raise UserError(f"Name the preset on the command line: --preset {options.preset}")
    return parsed.command, options


def read_config(config_type: Any, options: Namespace) -> Any:
    """Return the config whose fields are options. A field that is no option has its default."""
    return config_type(**{name: options[name] for name in config_type.__dataclass_fields__ if name in options})
