"""llama.cpp encodes and continues as we do. Runs where a folder of NODE_PATH holds the npm package node-llama-cpp."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.lm.checkpoint.test_gguf import TOKENIZER, make_model

PACKAGES = [Path(folder) / "node-llama-cpp" for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
PACKAGE = next((path for path in PACKAGES if path.is_dir()), None)
TEXT = "Once upon a time, there's 12345  cats.\n\n  Naïve café 日本語 🙂 I'LL go   "
SCRIPT = """
const [library, path, text, prompt, count] = process.argv.slice(2);
const {getLlama} = await import(library);
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, maxThreads: 1});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 64});
const generated = [];
for await (const id of context.getSequence().evaluate(JSON.parse(prompt), {temperature: 0, yieldEogToken: true})) {
    generated.push(id);
    if (generated.length >= Number(count)) break;
}
console.log("RESULT " + JSON.stringify([model.tokenize(text, false), generated]));
process.exit(0);
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not (PACKAGE and shutil.which("node")), reason="NODE_PATH has no node-llama-cpp, or node is missing"
)
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_llama_cpp_continues_as_we_do(tmp_path: Path, qk_norm: bool, is_tied: bool) -> None:
    from lm.checkpoint.gguf import save_gguf

    model, prompt, count = make_model(qk_norm=qk_norm, tied_embeddings=is_tied), TOKENIZER.encode("The little dog"), 40
    save_gguf(model, TOKENIZER, tmp_path / "model.gguf", "float32")
    ids = [*prompt]
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    arguments = [str(PACKAGE / "dist" / "index.js"), str(tmp_path / "model.gguf"), TEXT, json.dumps(prompt), str(count)]
    script = tmp_path / "generate.mjs"  # a file: the library forks node, whose children cannot inherit an --eval
    script.write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(["node", script, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    [result] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    encoded, generated = json.loads(result.removeprefix("RESULT "))
    assert encoded == TOKENIZER.encode(TEXT)
    assert generated == ids[len(prompt) :]
