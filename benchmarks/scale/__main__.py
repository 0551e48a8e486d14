"""Measure what a run costs by chunks, workers and requests, and predict runs of 1 and 15 TB on a cluster.

``python -m benchmarks.scale [--quick]``. First, real runs up to ``encode``, each a process, which report to a Prefect
server. The object store is moto behind a proxy that counts requests and delays each of them:

- 100, 1,000 and 10,000 small chunks, on a directory;
- 1 and 2 Dask workers, if prefect-dask is installed;
- groups of one small chunk on the object store, without a delay;
- the speed of each stage with 40 MB of stories and Python sources.

Their costs are the parameters of :mod:`benchmarks.scale.model`. The model then predicts other real runs, with delays of
20 and 100 ms, and runs of 1 and 15 TB. Prints the tables of docs/scale.md. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from benchmarks.scale.costs import Costs
from benchmarks.scale.overhead import measure_chunks, measure_dask, overhead_costs
from benchmarks.scale.predictions import check_model, predict_all
from benchmarks.scale.requests import measure_requests
from benchmarks.scale.site import open_site
from benchmarks.scale.sizes import QUICK, Sizes
from benchmarks.scale.work import measure_lists, measure_reading, measure_work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="try the program: texts too small to measure speed")
    options = parser.parse_args()
    missing = [name for name in ("moto", "s3fs") if find_spec(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} is missing: pip install 'textmill[peers]'")
    sizes = QUICK if options.quick else Sizes()
    with tempfile.TemporaryDirectory() as name, open_site(Path(name)) as site:
        by_chunks = measure_chunks(site, sizes.chunks)
        by_workers = measure_dask(site, sizes.dask_groups)
        steps = measure_requests(site, sizes.groups)
        costs = Costs(
            steps=steps,
            **measure_work(site, sizes.work_mb),
            **measure_reading(site.folder, sizes.work_mb),
            **measure_lists(site.folder, sizes.listed),
            **overhead_costs(by_chunks[0], by_chunks[-1]),
        )
        print(json.dumps({name: value for name, value in asdict(costs).items() if name != "steps"}, indent=1))
        checks = check_model(site, costs, sizes)
    predictions = predict_all(costs)
    result = {"chunks": by_chunks, "workers": by_workers, "costs": asdict(costs), "checks": checks}
    print(json.dumps({**result, "predictions": predictions}))


if __name__ == "__main__":
    main()
