"""Checks of Triton kernels for GPUs that are not there."""

import json
import os
import subprocess
import sys
from typing import Any

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # of a program, by compute capability


def compile_for_gpus(kernels: str, *shapes: str) -> list[dict[str, Any]]:
    """Compile kernels by :mod:`tests.helpers.gpu_compilation`, for shapes CAPABILITY-WIDTH-DTYPE; check their shared
    memory."""
    command = [sys.executable, "-m", "tests.helpers.gpu_compilation", kernels, *shapes]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert all(row["shared_bytes"] <= SHARED_BYTES[row["capability"]] for row in rows)
    return rows
