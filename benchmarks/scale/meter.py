"""Run ``textmill`` in this process, and write what its steps used to a file.

``python -m benchmarks.scale.meter RECORD [--counter URL] ARGUMENT …``. The URL returns the number of requests.
"""

import argparse
import json
import resource
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GROUP_SOURCES = 1  # in measured runs; a source of 1 GB is a group by itself too


class Meter:
    """Notes wall seconds, CPU seconds of the driver and requests of each step of a run, in the run's process."""

    def __init__(self, counter_url: str) -> None:
        self._counter_url = counter_url
        self.steps: dict[str, dict[str, float]] = {}
        self.items: dict[str, int] = {}
        self._sources: Any = None

    def _read(self) -> dict[str, float]:
        used, requests = resource.getrusage(resource.RUSAGE_SELF), 0
        if self._counter_url:
            with urllib.request.urlopen(self._counter_url) as response:
                requests = int(response.read())
        return {"seconds": time.perf_counter(), "cpu": used.ru_utime + used.ru_stime, "requests": requests}

    @contextmanager
    def step(self, name: str, items: int = 0) -> Iterator[None]:
        """Add what the ``with`` block uses to a step."""
        before = self._read()
        yield
        after = self._read()
        step = self.steps.setdefault(name, dict.fromkeys(before, 0.0))
        for kind in step:
            step[kind] += after[kind] - before[kind]
        self.items[name] = self.items.get(name, 0) + items

    def patch(self) -> None:
        """Note the steps of the pipelines that run later in this process.

        Methods are replaced, not a class: Dask would copy a class of this module together with the meter.
        """
        import lm.text.ingest
        from flows.executor import PrefectExecutor
        from tasks.runtime.stage import Stage

        lm.text.ingest._MAX_GROUP_SOURCES = GROUP_SOURCES
        meter, find_inputs = self, PrefectExecutor.find_inputs
        call, map_items, look_up = PrefectExecutor.call, PrefectExecutor.map, Stage.look_up

        def measured_call(executor: PrefectExecutor, stage: Stage, *arguments: Any) -> Any:
            with meter.step(stage.name, sum(len(argument) for argument in arguments if isinstance(argument, list))):
                return call(executor, stage, *arguments)

        def measured_map(executor: PrefectExecutor, stage: Stage, title: str, items: Any, *arguments: Any) -> Any:
            with meter.step(stage.name, sum(len(item) if isinstance(item, list) else 1 for item in items)):
                return map_items(executor, stage, title, items, *arguments)

        def measured_look_up(stage: Stage, *arguments: Any) -> Any:
            with meter.step(f"{stage.name} look-up"):
                return look_up(stage, *arguments)

        def measured_find_inputs(executor: PrefectExecutor, function: Any) -> Any:
            with meter.step("sources"):
                return find_inputs(executor, function)

        PrefectExecutor.call = measured_call  # type: ignore[method-assign, assignment]
        PrefectExecutor.map = measured_map  # type: ignore[method-assign, assignment]
        Stage.look_up = measured_look_up  # type: ignore[method-assign, assignment]
        PrefectExecutor.find_inputs = measured_find_inputs  # type: ignore[method-assign, assignment]


def run_measured(record: Path, counter_url: str, arguments: list[str]) -> int:
    """Run ``textmill`` with arguments. Return its exit status."""
    from textmill.cli.main import main as textmill

    meter = Meter(counter_url)
    meter.patch()
    code = textmill(arguments)
    for name, look_up in meter.steps.items():
        if step := meter.steps.get(name.removesuffix(" look-up")) if name.endswith(" look-up") else None:
            step.update({kind: step[kind] - look_up[kind] for kind in step})  # it is a part of the mapped step
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    record.write_text(json.dumps({"steps": meter.steps, "items": meter.items, "driver_mb": memory_mb}))
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--counter", default="")
    options, arguments = parser.parse_known_args()
    sys.exit(run_measured(options.record, options.counter, arguments))


if __name__ == "__main__":
    main()
