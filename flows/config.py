"""The configurations of flows: presets, YAML files and partial parameters; and the configuration of the pipeline."""

import functools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, get_args, get_type_hints

import yaml

from lm.common.config import PYDANTIC_CONFIG
from lm.common.errors import UserError, did_you_mean
from lm.curate.config import DecontaminateConfig, DeduplicateConfig, FilterConfig
from lm.experiments.config import parse_budget
from lm.inference.config import SampleConfig
from lm.model.config import AdapterConfig, ModelConfig
from lm.text.config import ChunkConfig, DataConfig
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig, fitting_warmup
from tasks.runtime.execution import Execution

_ADAPTER_RATE = 10  # learning rate of an adapter over that of a full training

StageName = Literal[
    "ingest",
    "classifier",
    "filter",
    "deduplicate",
    "repeats",
    "decontaminate",
    "budget",
    "chunk",
    "count",
    "merge",
    "encode",
    "train",
    "sample",
]


class FlowConfig:
    """What the configurations of all flows share: their presets, and the stages of a run."""

    __pydantic_config__ = PYDANTIC_CONFIG

    name: str
    STAGES: ClassVar[tuple[str, ...]]
    """Names of the flow's stages in their order."""
    PRESETS: ClassVar[Path]
    """Directory of the flow's presets."""
    PRESET_TEXTS: ClassVar[dict[str, str]] = {}
    """What each preset is for and costs, in a few words."""

    @classmethod
    def preset_names(cls) -> list[str]:
        """Return the names of the flow's presets."""
        return sorted(path.stem for path in cls.PRESETS.glob("*.yaml"))

    @classmethod
    def preset_path(cls, name: str) -> Path:
        """Return the file of a preset. Raise UserError with the closest name if there is no such preset."""
        names = cls.preset_names()
        if name not in names:
            raise UserError(f"There is no preset {name!r}{did_you_mean(name, names)}. Presets: {', '.join(names)}.")
        return cls.PRESETS / f"{name}.yaml"

    @classmethod
    def load_preset(cls, name: str) -> Self:
        """Return the configuration of a preset. Fields that the preset omits have their defaults."""
        return cls.load(cls.preset_path(name))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the configuration in a YAML file. Omitted fields have their defaults."""
        return cls.validate(read_yaml(path))

    @classmethod
    def validate(cls, fields: Any) -> Self:
        """Return the configuration with these fields. Raise UserError, which names the first field that is wrong."""
        from pydantic import ValidationError

        try:
            config: Self = cls._type_adapter().validate_python(fields)
        except ValidationError as error:
            first = error.errors()[0]
            message = first["msg"].removeprefix("Value error, ").rstrip(".") + "."
            raise UserError(": ".join(filter(None, [".".join(map(str, first["loc"])), message]))) from None
        return config

    @classmethod
    @functools.cache
    def _type_adapter(cls) -> Any:
        from pydantic import TypeAdapter  # slow to import

        adapter: Any = TypeAdapter(cls)
        # The schema takes a tenth of a second, and Prefect asks for it at each use of a flow. Pydantic looks for these
        # attributes first.
        for name in ("core_schema", "validator", "serializer"):
            setattr(cls, f"__pydantic_{name}__", getattr(adapter, name))
        return adapter

    @property
    def chosen_name(self) -> str:
        """The name that a user gave this configuration; empty if it is that of a preset."""
        presets = {path.stem for path in PipelineConfig.PRESETS.rglob("*.yaml")}
        return "" if re.sub("^(posttrain|curate)-", "", self.name) in presets else self.name

    def stated_fields(self, section: str) -> dict[str, Any]:
        """Return the fields of a section that a user set, or a preset other than the demo's: they have neither their
        default nor the value of the preset ``demo``, from which the command line starts. A section inside of another
        has a dot in its name."""
        kind = type(self)
        own, *others = (attrgetter(section)(of) for of in (self, kind.load_preset("demo"), kind()))
        values = {name: getattr(own, name) for name in own.__dataclass_fields__}
        return {name: value for name, value in values.items() if all(value != getattr(of, name) for of in others)}

    def rate_of_adapter(self, section: str) -> TrainConfig:
        """Return a section of a training with ten times its learning rates, unless a user set them: a full training's
        are too low for an adapter (Schulman et al. 2025, LoRA Without Regret). Muon's updates have a size of their own,
        and the rates of its matrices stay."""
        train: TrainConfig = attrgetter(section)(self)
        stated = self.stated_fields(section)
        if train.optimizer != "adamw" or "max_lr" in stated:
            return train
        min_lr = train.min_lr if "min_lr" in stated else _ADAPTER_RATE * train.min_lr
        return replace(train, max_lr=_ADAPTER_RATE * train.max_lr, min_lr=min_lr)

    def why_missing(self, stage: str) -> str:
        """Return why a run with this configuration has no such stage; empty if it has one."""
        return ""

    def stage_names(self) -> list[str]:
        """Return the names of the stages of a run in their order, once for each time that a run looks one up."""
        return [name for name in self.STAGES if not self.why_missing(name)]

    def check_stages(self, until: str | None, refresh: Sequence[str]) -> None:
        """Raise UserError if a run with this configuration up to ``until`` does not reach a stage of ``refresh``."""
        for name in (*filter(None, [until]), *refresh):
            if reason := self.why_missing(name):
                raise UserError(reason)
            if until and self.STAGES.index(name) > self.STAGES.index(until):
                raise UserError(f"To refresh {name} has no effect, because the run ends with {until}.")


@dataclass(frozen=True)
class PipelineConfig(FlowConfig):
    """Configuration of the whole pipeline."""

    STAGES = get_args(StageName)
    PRESETS = Path(__file__).parent / "presets"
    PRESET_TEXTS = {  # noqa: RUF012 # dataclasses take an annotation for a field
        "demo": "generated stories, 2 minutes on 2 CPU cores",
        "stories-cpu": "22 MB of TinyStories, an hour",
        "stories-fast": "the same model by a faster recipe, half an hour",
        "tinystories": "CS336 assignment 1, on a GPU",
        "owt": "the same on OpenWebText",
    }

    name: str = "demo"
    """Name of the run, for --model and textmill runs. It has no effect on results. Default: two words at random."""
    budget: str = ""
    """What the run may cost: a time such as 30m or 2h, FLOPs such as 1e16flops, or tokens such as 50Mtokens. It decides
    chunk, tokenizer.vocab_size, model and train, from the text and the speed of this machine. Default: they are those
    of this configuration."""
    data: DataConfig = field(default_factory=DataConfig)
    """Sources of the text."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Rules that remove documents. Off by default."""
    deduplicate: DeduplicateConfig = field(default_factory=DeduplicateConfig)
    """Removal of copies of documents. Off by default."""
    decontaminate: DecontaminateConfig = field(default_factory=DecontaminateConfig)
    """Removal of training text that a model is tested on. Off by default."""
    chunk: ChunkConfig = field(default_factory=ChunkConfig)
    """Size of the chunks that are processed in parallel."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Training of the tokenizer."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Architecture of the Transformer."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training of the model."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """A small adapter (LoRA) that is trained on train.init_from. Off by default."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Sampling of text from the model."""
    execution: Execution = field(default_factory=Execution)
    """How the work runs on this machine. It never causes a stage to run again."""

    def __post_init__(self) -> None:
        has_own_tokenizer = not self.train.init_from
        if has_own_tokenizer and self.data.separator not in self.tokenizer.special_tokens:
            raise UserError(
                f"data.separator {self.data.separator!r} is not among tokenizer.special_tokens "
                f"{self.tokenizer.special_tokens}; add it there."
            )
        if self.adapter.is_on and not self.train.init_from:
            raise UserError(
                f"adapter.rank is {self.adapter.rank}: an adapter needs a trained model; name it in train.init_from, "
                "or leave adapter.rank out."
            )
        if self.budget:
            parse_budget(self.budget)
            if self.execution.train_deployment:
                raise UserError(
                    "budget measures the speed of this machine, but execution.train_deployment trains on another one. "
                    "Run with --until budget there, and give the config.yaml that it writes to --config here."
                )
            if self.execution.tensor_parallel > 1:
                raise UserError(
                    "budget measures the speed of a process that has the whole model; set execution.tensor_parallel to "
                    "1, or run with --until budget without it, and give the config.yaml that it writes to --config."
                )
            if self.execution.processes.bit_count() > 1:  # the batch must be a multiple
                raise UserError(
                    f"A budget chooses batches that are powers of two, which {self.execution.processes} processes "
                    "cannot share; set execution.processes to a power of two."
                )

    def why_missing(self, stage: str) -> str:
        """Return why a run with this configuration has no such stage; empty if it has one."""
        if stage == "budget" and not self.budget:
            return "There is no budget to choose a configuration for; give one, such as --budget 30m."
        if reason := why_not_curated(self, stage):
            return reason
        if stage in ("count", "merge") and self.train.init_from:
            return f"There is no stage {stage}: the tokenizer is that of the model of train.init_from."
        return ""

    @property
    def training(self) -> TrainConfig:
        """The section train, with the learning rate of an adapter if one is trained."""
        return self.rate_of_adapter("train") if self.adapter.is_on else self.train

    def options_replaced_by_budget(self) -> list[str]:
        """Return the options that were set, see :meth:`stated_fields`, although the budget chooses them."""
        if not self.budget:
            return []
        options = [
            f"{section}.{name}" for section in ("chunk", "model", "train") for name in self.stated_fields(section)
        ]
        return [*(["tokenizer.vocab_size"] if "vocab_size" in self.stated_fields("tokenizer") else []), *options]

    def has_demo_model(self) -> bool:
        """Return whether a text of the user's own gets the demo's model and training, which are made for seconds."""
        demo = PipelineConfig.load_preset("demo")
        is_own_text = self.data.train != demo.data.train
        return not self.budget and is_own_text and (self.model, self.train) == (demo.model, demo.train)


class TextConfig(Protocol):
    """The sections of a configuration that decide the text."""

    @property
    def data(self) -> DataConfig:
        """Sources of the text."""

    @property
    def filter(self) -> FilterConfig:
        """Rules that remove documents."""

    @property
    def deduplicate(self) -> DeduplicateConfig:
        """Removal of copies of documents."""

    @property
    def decontaminate(self) -> DecontaminateConfig:
        """Removal of training text that is in the validation text or in files."""


def why_not_curated(config: TextConfig, stage: str) -> str:
    """Return why a run lacks a stage that removes text; empty for one that it has, and for other stages."""
    if stage == "classifier" and not config.filter.score.wanted:
        return "There is no stage classifier: nothing is scored. Give examples: --filter.score.wanted and .unwanted."
    if stage == "filter" and not config.filter.is_on:
        return "There is no stage filter: nothing is filtered. Turn rules on, such as with --filter.rules '{}'."
    if stage == "deduplicate" and not config.deduplicate.is_on:
        return "There is no stage deduplicate: copies stay. Turn it on, such as with --deduplicate.equal true."
    if stage == "repeats" and not config.deduplicate.repeats:
        return "There is no stage repeats: repeated lines stay. Turn it on, such as with --deduplicate.repeats line."
    if stage == "decontaminate" and not config.decontaminate.is_on:
        return "There is no stage decontaminate: nothing is protected. Turn on --decontaminate.validation true."
    return ""


def complete(config: Any, default: Any) -> Any:
    """Complete a partial ``config`` of a flow, such as ``-p config='{"train": {"steps": 600}}'``.

    Prefect replaces a deployment's parameter as a whole. Missing fields come from the deployment's own ``config``, then
    from ``default``, a config of the flow.
    """
    if not isinstance(config, dict):
        return config
    from prefect.client.orchestration import get_client
    from prefect.runtime import deployment

    base = asdict(default)
    if deployment.id:
        with get_client(sync_client=True) as client:
            own = client.read_deployment(deployment.id).parameters.get("config", {})
            base = merge_fields(type(default), base, own)
    return merge_fields(type(default), base, config)


def merge_fields(config_type: type[Any], base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration, with those of ``override`` in their place.

    A section, which is a field with a dataclass, keeps its other fields. Other values are replaced as a whole, also a
    mapping such as ``rewards``.
    """
    merged = base | override
    for name, hint in get_type_hints(config_type).items():
        kinds = (hint, *get_args(hint))  # None may stand for a section
        section = next((kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)), None)
        if section and isinstance(base.get(name), dict) and isinstance(override.get(name), dict):
            merged[name] = merge_fields(section, base[name], override[name])
    if config_type is TrainConfig and "warmup_steps" not in override:
        with suppress(KeyError, TypeError):  # the fields are not checked yet
            merged["warmup_steps"] = fitting_warmup(merged, base)
    return merged


def flat_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config by their options, such as ``train.steps``."""
    sections = {name: value for name, value in config.items() if isinstance(value, dict)}
    fields = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {name: value for name, value in config.items() if name not in sections} | fields


class _YamlLoader(yaml.SafeLoader):
    """Refuses a key that is repeated, whose first value would be lost, and one that is not text."""

    are_number_keys_text = False

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of a mapping, before other mappings are merged into it: these may have the same keys."""
        node = super().compose_mapping_node(anchor)
        keys = set[str]()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key: Any = self.construct_object(key_node, deep=True)
            if self.are_number_keys_text and type(key) in (int, float):  # not bool
                key_node.tag, key = "tag:yaml.org,2002:str", key_node.value
                self.constructed_objects.pop(key_node)
            if not isinstance(key, str):
                problem = f"the key {key!r} is not text; a name of digits, or such as yes, needs quotes"
            elif key in keys:
                problem = f"the key {key!r} is given twice"
            else:
                keys.add(key)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        return node


def read_yaml(path: Path, are_number_keys_text: bool = False) -> Any:
    """Return the content of a YAML file. Raise UserError, which names the file, if it cannot be read.

    ``are_number_keys_text``: take keys that are numbers, such as the names of sizes, as text instead of refusing them.
    """
    try:
        with path.open(encoding="utf-8") as file:
            loader = _YamlLoader(file)
            loader.are_number_keys_text = are_number_keys_text
            return loader.get_single_data()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}.") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
