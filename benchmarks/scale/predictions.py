"""Predictions of the model: of other real runs, to see how well it fits, and of runs of 1 and 15 TB."""

import math
from dataclasses import asdict
from typing import Any

from benchmarks.scale.costs import Costs
from benchmarks.scale.meter import GROUP_SOURCES
from benchmarks.scale.model import Cluster, Corpus, Prediction, predict
from benchmarks.scale.requests import run_on_store
from benchmarks.scale.site import GROUP_BYTES, Site, mixed_text, small_text
from benchmarks.scale.sizes import Sizes
from benchmarks.scale.work import WORK_GROUPS

# The clusters of the predictions.
WORKERS = (1, 10, 100)
CORES_PER_WORKER = 16
WORKER_BYTES_PER_SECOND = 1.25e9  # 10 Gbit/s, of the driver too
BUCKET_BYTES_PER_SECOND = 12.5e9  # 100 Gbit/s
BUCKET_REQUESTS_PER_SECOND = 3_500.0  # writes of one S3 prefix; reads may be 5,500
LATENCIES_SECONDS = (0.02, 0.1)
SOURCE_BYTES = 1e9
CORPORA = {
    "1 TB in 1 MB chunks": Corpus(1e12, 1e6, SOURCE_BYTES),
    "15 TB in 1 MB chunks": Corpus(15e12, 1e6, SOURCE_BYTES),
    "15 TB in 256 MB chunks": Corpus(15e12, 256e6, SOURCE_BYTES),
}


def check_model(site: Site, costs: Costs, sizes: Sizes) -> list[dict[str, Any]]:
    """Predict runs with delays, which are not among the measured costs, and run them."""
    small, large = small_text(sizes.checked_groups * GROUP_BYTES), mixed_text(sizes.work_mb * 1_000_000)
    cases = [(small, sizes.checked_groups, delay, threads) for delay, threads in sizes.checks]
    results: list[dict[str, Any]] = []
    for text, groups, delay, threads in (*cases, (large, WORK_GROUPS, 0.1, 2))[: sizes.max_checks]:
        run = run_on_store(site, f"check-{len(results)}", text, groups, delay, threads)
        count, valid = run["items"]["count-group"], run["items"]["encode-group"] - run["items"]["count-group"]
        valid_bytes = len(text) * valid / (count + valid)
        train_bytes = len(text) - valid_bytes
        corpus = Corpus(train_bytes, train_bytes / count, train_bytes / run["sources"], valid_bytes, GROUP_SOURCES)
        busy = site.store.seconds_per_request
        predicted = predict(costs, corpus, Cluster(1, threads, delay + busy, math.inf, math.inf, 1 / busy))
        measured = {name: {"seconds": 0.0, "requests": 0.0} for name in predicted.seconds}
        for name, step in run["steps"].items():
            for kind in ("seconds", "requests"):
                measured[stage_of(name)][kind] += step[kind]
        print(
            f"{count} + {valid} groups of {corpus.chunk_bytes / 1e6:.3f} MB, {1000 * delay:.0f} ms, {threads} threads:"
        )
        rows: list[dict[str, Any]] = [
            {
                "stage": name,
                **values,
                "model_seconds": predicted.seconds[name],
                "model_requests": predicted.requests[name],
            }
            for name, values in measured.items()
        ]
        rows.append({"stage": "total"} | {kind: sum(row[kind] for row in rows) for kind in rows[0] if kind != "stage"})
        for row in rows:
            row["ratio"] = row["model_seconds"] / row["seconds"]
            print(
                f"  {row['stage']:7} predicted {row['model_seconds']:6.1f} s, measured {row['seconds']:6.1f} s, "
                f"ratio {row['ratio']:.2f}; requests {row['model_requests']:5.0f} and {row['requests']:5.0f}",
                flush=True,
            )
        results.append({"groups": count + valid, "delay_seconds": delay, "threads": threads, "stages": rows})
    return results


def stage_of(step: str) -> str:
    """Return the stage of the model that a measured step belongs to."""
    if step == "encode":
        return "index"
    return "ingest" if step == "sources" else step.partition(" ")[0].partition("-")[0]


def predict_all(costs: Costs) -> list[dict[str, Any]]:
    """Print and return the predictions for large texts."""
    results: list[dict[str, Any]] = []
    for name, corpus in CORPORA.items():
        for workers in WORKERS:
            for latency in LATENCIES_SECONDS:
                for threads in (1, CORES_PER_WORKER) if workers == max(WORKERS) else (1,):
                    rates = WORKER_BYTES_PER_SECOND, BUCKET_BYTES_PER_SECOND, BUCKET_REQUESTS_PER_SECOND
                    cluster = Cluster(workers, CORES_PER_WORKER, latency, *rates, threads)
                    prediction = predict(costs, corpus, cluster)
                    results.append({"corpus": name, **asdict(cluster), **asdict(prediction)})
                    print(describe_prediction(name, cluster, prediction), flush=True)
    return results


def describe_prediction(name: str, cluster: Cluster, prediction: Prediction) -> str:
    """Return a line of the table of predictions."""
    hours = "  ".join(f"{stage} {seconds / 3600:.2f}" for stage, seconds in prediction.seconds.items())
    return "; ".join(
        (
            f"{name}, {cluster.workers} workers, {1000 * cluster.latency_seconds:.0f} ms",
            f"{cluster.threads_per_task} threads a task",
            f"{prediction.total_seconds / 3600:.1f} h ({hours})",
            f"{prediction.groups:,} groups",
            f"{sum(prediction.requests.values()) / 1e6:.2f} M requests",
            f"{prediction.busy_cores:,} busy cores",
            f"driver {prediction.driver_mb / 1e3:.1f} GB",
            f"merge {prediction.merge_mb / 1e3:.1f} GB for {prediction.pretokens / 1e6:,.0f} M pretokens",
            f"{prediction.rows:,.0f} rows",
        )
    )
