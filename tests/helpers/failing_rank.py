"""A process of a job that ends as the job says, without torch.

``python -m tests.helpers.failing_rank JOB.json``: the job has the exit code and the last message of each rank. A rank
with the code null waits for the others, and one with a negative code gets that signal.
"""

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    code, message = json.loads(Path(sys.argv[1]).read_text())[int(os.environ["RANK"])]
    print("some output", flush=True)
    print(f"lm.train: {message}", file=sys.stderr, flush=True)
    time.sleep(600 if code is None else 0)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
