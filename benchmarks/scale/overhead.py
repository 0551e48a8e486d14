"""What more chunks and more Dask workers cost: wall and CPU seconds, memory, and rows in Prefect's database."""

import sqlite3
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.chunks import count_chunks, count_rows
from benchmarks.scale.site import GROUP_BYTES, Site, read_manifests, small_text
from flows.clusters import _MAX_TASK_RUNS

_CHUNK_BYTES = 2_000
_ROWS_SECONDS = 3.0  # until the server has written the last events of a run


def count_log_rows(database: Path) -> int:
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        return int(connection.execute("SELECT count(*) FROM log").fetchone()[0])


def measure_chunks(site: Site, counts: Sequence[int]) -> list[dict[str, Any]]:
    """Run with more and more small chunks on a directory: wall, CPU, memory and rows."""
    results = []
    for count in counts:
        corpus = site.folder / f"chunks-{count}.txt"
        corpus.write_bytes(small_text(count * (_CHUNK_BYTES + 150)))
        rows, log_rows = count_rows(site.database), count_log_rows(site.database)
        root = site.folder / f"chunks-{count}"
        result = site.run(str(root), [str(corpus)], _CHUNK_BYTES, 2)
        time.sleep(_ROWS_SECONDS)
        groups = result["items"]["count-group"] + result["items"]["encode-group"]
        result |= {"chunks": count_chunks(root), "groups": groups}
        result |= {"rows": count_rows(site.database) - rows, "log_rows": count_log_rows(site.database) - log_rows}
        results.append(result)
    for result, previous in zip(results, [None, *results[:-1]], strict=True):
        line = f"{result['chunks']:6} chunks, {result['groups']:4} groups: wall {result['wall']:6.1f} s, "
        line += f"CPU {result['cpu']:6.1f} s, driver {result['driver_mb']:.0f} MB, {result['rows']:,} rows"
        if previous:
            extra = result["chunks"] - previous["chunks"]
            wall, cpu = ((result[kind] - previous[kind]) / extra * 1000 for kind in ("wall", "cpu"))
            line += f"; each more chunk: wall {wall:.2f} ms, CPU {cpu:.2f} ms"
        print(line, flush=True)
    return results


def overhead_costs(few: dict[str, Any], many: dict[str, Any]) -> dict[str, float]:
    """Return the memory and the rows for each group and each task run, from runs of :func:`measure_chunks`."""
    tasks = sum(min(_MAX_TASK_RUNS, many["items"][name]) for name in ("count-group", "encode-group"))
    extra_kb, extra_groups = 1e3 * (many["driver_mb"] - few["driver_mb"]), many["groups"] - few["groups"]
    return {
        "driver_base_mb": few["driver_mb"],
        "driver_kb_per_group": max(0.0, extra_kb / extra_groups),
        "rows_per_run": 0.0,
        "rows_per_task_run": (many["rows"] - many["log_rows"]) / tasks,
        "rows_per_group": many["log_rows"] / many["groups"],
    }


def measure_dask(site: Site, groups: int) -> list[dict[str, Any]]:
    """Run on one and on two Dask workers of this machine, with a directory as root."""
    if not groups or find_spec("prefect_dask") is None:
        print("Dask is skipped: " + ("no groups" if find_spec("prefect_dask") else "prefect-dask is not installed"))
        return []
    results: list[dict[str, Any]] = []
    corpus = site.folder / "dask.txt"
    corpus.write_bytes(small_text(groups * GROUP_BYTES))
    for workers in (1, 2):
        root = str(site.folder / f"dask-{workers}")
        result = site.run(root, [str(corpus)], GROUP_BYTES * 7 // 8, workers, "--execution.runner", "dask")
        made = [manifest["made"] for manifest in read_manifests(Path(root), "encode-group")]
        first, last = min(part["started"] for part in made), max(part["started"] + part["seconds"] for part in made)
        print(
            f"Dask, {workers} workers: wall {result['wall']:.1f} s, with start of the cluster; encode "
            f"{1000 * (last - first) / len(made):.0f} ms a group ({len(made)} groups), driver "
            f"{result['driver_mb']:.0f} MB",
            flush=True,
        )
        results.append(result | {"workers": workers})
    return results
