"""A tracker that remembers what it got."""

from types import ModuleType
from typing import Any


class Recorder(ModuleType):
    """A module with the functions of Weights & Biases, which records its calls."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[Any] = []

    def init(self, **settings: Any) -> None:
        self.calls.append(settings)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.calls.append((step, metrics))

    def finish(self) -> None:
        self.calls.append("finished")
