"""Requests and CPU seconds of each step on an object store."""

from collections.abc import Sequence
from typing import Any

from benchmarks.object_store import BUCKET
from benchmarks.scale.costs import StepCost
from benchmarks.scale.site import GROUP_BYTES, Site, small_text


def run_on_store(site: Site, name: str, text: bytes, groups: int, delay: float, threads: int) -> dict[str, Any]:
    """Run with about ``groups`` groups of one chunk, in a quarter as many sources, on the object store.

    ``delay`` of each request is in seconds.
    """
    sources = site.put_sources(f"text-{name}", text, max(1, groups // 4))
    site.store.delay_seconds = delay
    try:
        result = site.run(f"s3://{BUCKET}/{name}", sources, len(text) * 7 // (8 * groups), threads)
    finally:
        site.store.delay_seconds = 0.0
    return result | {"sources": len(sources)}


def measure_requests(site: Site, group_counts: tuple[int, int]) -> dict[str, StepCost]:
    """Return the requests and CPU seconds of each step on an object store, from a run with few groups and one with
    more."""
    few, many = (
        run_on_store(site, f"groups-{count}", small_text(count * GROUP_BYTES), count, 0.0, 1) for count in group_counts
    )
    costs: dict[str, StepCost] = {}
    for name, step in many["steps"].items():
        mapped = name.removesuffix(" look-up")
        items = [run["sources"] if name == "sources" else run["items"].get(mapped, 0) for run in (few, many)]
        costs[name] = fit(items, few["steps"].get(name, dict.fromkeys(step, 0.0)), step)
        print(f"{name:20} {step['requests']:5.0f} requests for {items[1]:3} items: {describe(costs[name])}", flush=True)
    return costs


def fit(items: Sequence[int], few: dict[str, float], many: dict[str, float]) -> StepCost:
    """Return the cost of a step from two runs, with another number of items."""
    extra = items[1] - items[0]
    if not extra:
        return StepCost(many["requests"], 0.0, many["cpu"], 0.0)
    requests, seconds = (max(0.0, (many[kind] - few[kind]) / extra) for kind in ("requests", "cpu"))
    fixed = [max(0.0, many[kind] - each * items[1]) for kind, each in (("requests", requests), ("cpu", seconds))]
    return StepCost(fixed[0], requests, fixed[1], seconds)


def describe(cost: StepCost) -> str:
    return f"{cost.fixed_requests:.1f} + {cost.requests:.2f} an item, CPU {1000 * cost.seconds:.1f} ms an item"
