"""llama.cpp, by way of the npm package ``node-llama-cpp``, which has it compiled: time its greedy tokens.

``npm install node-llama-cpp``, and set ``NODE_PATH`` to its ``node_modules``. The times have JavaScript's calls in
them, some tenths of a millisecond a token.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from lm.checkpoint.gguf.writer import GGUFType, save_gguf
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer

SCRIPT = """
const [library, path, prompts, count, threads] = process.argv.slice(2);
const all = JSON.parse(prompts);
const {getLlama} = await import(library);
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 1024, threads: Number(threads), sequences: all.length});
const sequences = all.map(() => context.getSequence());
for (let run = 0; run < 2; run++) {
    for (const sequence of sequences) await sequence.clearHistory();
    const times = [performance.now()], ids = all.map(() => []);
    const options = {temperature: 0, yieldEogToken: true};
    const texts = sequences.map((sequence, i) => sequence.evaluate(all[i], options));
    for (let step = 0; step < Number(count); step++) {
        const results = await Promise.all(texts.map(text => text.next()));
        times.push(performance.now());
        results.forEach((result, i) => ids[i].push(result.value));
    }
    for (const text of texts) await text.return();
    console.log("RESULT " + JSON.stringify({times, ids}));
}
process.exit(0);
"""


class Measured(NamedTuple):
    """Milliseconds of the clock at the start and after each id of all sequences, and the ids."""

    times: list[float]
    ids: list[list[int]]


def find_package() -> Path | None:
    """Return the folder of the npm package, or None if it or node is missing."""
    folders = [Path(folder, "node-llama-cpp") for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
    return next((folder for folder in folders if folder.is_dir() and shutil.which("node")), None)


def generate(model: TransformerLM, prompts: list[list[int]], count: int, weights: GGUFType, threads: int) -> Measured:
    """Return the times of the second of two runs."""
    tokenizer = Tokenizer({**{i: bytes([i]) for i in range(256)}, 256: b"ab"}, [(b"a", b"b")], [END_OF_TEXT])
    with tempfile.TemporaryDirectory() as folder:
        path, script = Path(folder, "model.gguf"), Path(folder, "generate.mjs")
        save_gguf(model, tokenizer, path, weights)
        script.write_text(SCRIPT, encoding="utf-8")
        library = f"{find_package()}/dist/index.js"
        command: list[Any] = ["node", script, library, path, json.dumps(prompts), count, threads]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return Measured(**json.loads(lines[-1]))
