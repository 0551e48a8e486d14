"""The configuration of a run: one section a subject, each described where its algorithm is; and the presets."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import get_client
from prefect.runtime import deployment
from pydantic import TypeAdapter

from lm.bounds import FORM
from lm.bpe import TokenizerConfig
from lm.chunks import ChunkConfig
from lm.corpus import DataConfig
from lm.errors import UserError, nearest
from lm.execution import Execution
from lm.model import ModelConfig
from lm.recipe import TrainConfig
from lm.sampling import SampleConfig

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class PipelineConfig:
    """A whole run, section by section."""

    __pydantic_config__ = FORM

    data: DataConfig = field(default_factory=DataConfig)
    """Where the text comes from."""
    chunk: ChunkConfig = field(default_factory=ChunkConfig)
    """How it is cut into the units of parallel work."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """What the tokenizer is trained to be."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Shape of the Transformer."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How it is trained."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """How text is sampled from it."""
    execution: Execution = field(default_factory=Execution)
    """How the work runs on this machine; decides no result."""

    def __post_init__(self) -> None:
        if self.data.separator not in self.tokenizer.special_tokens:
            raise UserError(
                f"data.separator {self.data.separator!r} is not among tokenizer.special_tokens "
                f"{self.tokenizer.special_tokens}; add it there."
            )


def preset_path(name: str) -> Path:
    """The file of a preset; raises UserError with the nearest name when there is none."""
    path = PRESETS / f"{name}.yaml"
    names = sorted(found.stem for found in PRESETS.glob("*.yaml"))
    if name not in names:
        raise UserError(f"There is no preset {name!r}{nearest(name, names)}. Presets: {', '.join(names)}.")
    return path


def load_preset(name: str) -> PipelineConfig:
    """The configuration that a preset gives, with the defaults of the fields it leaves out."""
    content = yaml.safe_load(preset_path(name).read_text(encoding="utf-8"))
    return TypeAdapter(PipelineConfig).validate_python(content)


def preset_parameters(name: str) -> dict[str, Any]:
    """A preset as a deployment's parameter ``config``: a step of ``prefect.yaml``."""
    return {"config": asdict(load_preset(name))}


def fill_in(given: Any) -> Any:
    """Complete a ``config`` that was given in part, as in ``-p config='{"train": {"steps": 20}}'``.

    Prefect replaces a deployment's parameter as a whole. What was left out is what the deployment has, or the demo.
    """
    if not isinstance(given, dict):
        return given
    base = asdict(load_preset("demo"))
    if deployment.id:
        with get_client(sync_client=True) as client:
            base = _merged(base, client.read_deployment(deployment.id).parameters.get("config", {}))
    return _merged(base, given)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = [name for name in base if isinstance(base[name], dict) and isinstance(over.get(name), dict)]
    return base | over | {name: _merged(base[name], over[name]) for name in both}
