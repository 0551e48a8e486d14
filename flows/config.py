"""The configuration of a run, one section per subject, and the presets."""

from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from flows.yaml_files import read_yaml
from lm.common.config import PYDANTIC_CONFIG
from lm.common.errors import UserError, did_you_mean
from lm.experiments.budget import parse_budget
from lm.inference.config import SampleConfig
from lm.model.config import ModelConfig
from lm.text.config import ChunkConfig, DataConfig
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from tasks.runtime.execution import Execution

T = TypeVar("T")
PRESETS = Path(__file__).parent / "presets"

StageName = Literal["ingest", "budget", "chunk", "count", "merge", "encode", "train", "sample"]


@dataclass(frozen=True)
class PipelineConfig:
    """Configuration of the whole pipeline."""

    __pydantic_config__ = PYDANTIC_CONFIG

    name: str = "demo"
    """Name of this configuration, part of the names of artifacts in Prefect. It has no effect on results."""
    budget: str = ""
    """What the run may cost: a time such as 30m or 2h, FLOPs such as 1e16flops, or tokens such as 50Mtokens. It decides
    chunk, tokenizer.vocab_size, model and train, from the text and the speed of this machine. Default: they are those
    of this configuration."""
    data: DataConfig = field(default_factory=DataConfig)
    """Sources of the text."""
    chunk: ChunkConfig = field(default_factory=ChunkConfig)
    """Size of the chunks that are processed in parallel."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Training of the tokenizer."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Architecture of the Transformer."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training of the model."""
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
        if self.budget:
            parse_budget(self.budget)
            if self.execution.train_deployment:
                raise UserError(
                    "budget measures the speed of this machine, but execution.train_deployment trains on another one. "
                    "Run with --until budget there, and give the config.yaml that it writes to --config here."
                )
            if self.execution.processes.bit_count() > 1:  # the batch must be a multiple
                raise UserError(
                    f"A budget chooses batches that are powers of two, which {self.execution.processes} processes "
                    "cannot share; set execution.processes to a power of two."
                )


def preset_path(name: str, presets: Path = PRESETS) -> Path:
    """Return the file of a preset. Raise UserError with the closest name if there is no such preset."""
    names = preset_names(presets)
    if name not in names:
        raise UserError(f"There is no preset {name!r}{did_you_mean(name, names)}. Presets: {', '.join(names)}.")
    return presets / f"{name}.yaml"


def preset_names(presets: Path = PRESETS) -> list[str]:
    """Return the names of a flow's presets."""
    return sorted(path.stem for path in presets.glob("*.yaml"))


def load_preset(name: str) -> PipelineConfig:
    """Return the configuration of a preset. Fields that the preset omits have their defaults."""
    return load_config(PipelineConfig, preset_path(name))


def load_config(config_type: type[T], path: Path) -> T:
    """Return the configuration in a YAML file. Omitted fields have their defaults."""
    from pydantic import TypeAdapter

    return TypeAdapter(config_type).validate_python(read_yaml(path))


def has_demo_model(config: PipelineConfig) -> bool:
    """Return whether a text of the user's own gets the demo's model and training, which are made for seconds."""
    demo = load_preset("demo")
    return (
        not config.budget
        and config.data.train != demo.data.train
        and (config.model, config.train) == (demo.model, demo.train)
    )


def options_replaced_by_budget(config: PipelineConfig) -> list[str]:
    """Return the options that a user, or a preset other than the demo's, set although the budget chooses them."""
    if not config.budget:
        return []
    demo, default = load_preset("demo"), PipelineConfig()
    names = [
        f"{section}.{name}" for section in ("chunk", "model", "train") for name in asdict(getattr(default, section))
    ]

    def value(of: PipelineConfig, option: str) -> Any:
        section, _, name = option.partition(".")
        return getattr(getattr(of, section), name)

    return [
        option
        for option in ["tokenizer.vocab_size", *names]
        if value(config, option) not in (value(demo, option), value(default, option))
    ]


def preset_parameters(name: str) -> dict[str, Any]:
    """Return a preset as the parameter ``config`` of a deployment. ``prefect.yaml`` calls it as a build step."""
    return {"config": asdict(load_preset(name))}


def complete_config(config: Any) -> Any:
    """Complete a partial ``config`` of the flow ``pipeline``; see :func:`complete`."""
    return complete(config, load_preset("demo"))


def complete(config: Any, default: Any) -> Any:
    """Complete a partial ``config``, such as ``-p config='{"train": {"steps": 600}}'``.

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
    return merged
