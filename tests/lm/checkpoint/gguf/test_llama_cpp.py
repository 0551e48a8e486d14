"""llama.cpp encodes and continues as we do. Runs where a folder of NODE_PATH holds the npm package node-llama-cpp."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lm.checkpoint.gguf.writer import save_gguf
from lm.model.config import RopeScaling
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers import make_tokenizer
from tests.lm.checkpoint.gguf.test_writer import TOKENIZER, make_model

PACKAGES = [Path(folder) / "node-llama-cpp" for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
PACKAGE = next((path for path in PACKAGES if path.is_dir()), None)
TEXT = "Once upon a time, there's 12345  cats.\n\n  Naïve café 日本語 🙂 I'LL go   "
SCRIPT = """
const [library, path, text, prompt, count, size] = process.argv.slice(2);
const {getLlama} = await import(library);
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, maxThreads: 1});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 64});
const generated = [];
for await (const id of context.getSequence().evaluate(JSON.parse(prompt), {temperature: 0, yieldEogToken: true})) {
    generated.push(id);
    if (generated.length >= Number(count)) break;
}
const ends = [...Array(Number(size)).keys()].filter((id) => model.isEogToken(id));
console.log("RESULT " + JSON.stringify([model.tokenize(text, false), generated, model.tokenize(text, true), ends]));
process.exit(0);
"""


needs_llama_cpp = pytest.mark.skipif(
    not (PACKAGE and shutil.which("node")), reason="NODE_PATH has no node-llama-cpp, or node is missing"
)
pytestmark = [pytest.mark.slow, needs_llama_cpp]


class Output(NamedTuple):
    """What llama.cpp makes of a file."""

    encoded: list[int]
    """The ids of the text, whose special tokens are plain text."""
    generated: list[int]
    """The greedy tokens after the prompt."""
    encoded_special: list[int]
    """The ids of the text with its special tokens."""
    end_ids: list[int]
    """The ids that end a generation."""


def run_llama_cpp(directory: Path, text: str, prompt: list[int], count: int, size: int = 0) -> Output:
    """Return what llama.cpp makes of the file ``model.gguf``; ``size`` ids are tried as ends."""
    library, model = str(PACKAGE) + "/dist/index.js", str(directory / "model.gguf")
    script = directory / "generate.mjs"  # a file: the library forks node, whose children cannot inherit an --eval
    script.write_text(SCRIPT, encoding="utf-8")
    command = ["node", str(script), library, model, text, json.dumps(prompt), str(count), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    [result] = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return Output(*json.loads(result.removeprefix("RESULT ")))


LLAMA3 = RopeScaling(factor=8.0, original_context_length=16)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied_embeddings": True},
        {"qk_norm": True},
        {"qk_norm": True, "tied_embeddings": True, "head_dim": 24},
        {"head_dim": 24},
        {"qkv_bias": True},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": LLAMA3, "head_dim": 24},
        {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
        {"rope_scaling": RopeScaling(kind="linear", factor=4.0), "qk_norm": True},
    ],
    ids=str,
)
def test_llama_cpp_continues_as_we_do(tmp_path: Path, options: dict[str, Any]) -> None:
    model, prompt, count = make_model(**options), TOKENIZER.encode("The little dog"), 40
    save_gguf(model, TOKENIZER, tmp_path / "model.gguf", "float32")
    ids = [*prompt]
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    output = run_llama_cpp(tmp_path, TEXT, prompt, count)
    assert output.encoded == TOKENIZER.encode(TEXT)
    assert output.generated == ids[len(prompt) :]


@pytest.mark.parametrize("pattern", ["gpt2", "llama3", "llama3, whole tokens", "qwen2", "deepseek"])
def test_llama_cpp_encodes_as_we_do(tmp_path: Path, pattern: str) -> None:
    trained = make_tokenizer(pattern.partition(",")[0], special_tokens=[END_OF_TEXT])
    parts = trained.parts._replace(ignore_merges="whole" in pattern)
    if parts.ignore_merges:  # no merge makes it
        parts = parts._replace(vocab=parts.vocab | {trained.size: b" zebra"})
    tokenizer = Tokenizer(*parts)
    save_gguf(make_model(vocab_size=tokenizer.size), tokenizer, tmp_path / "model.gguf", "float32")
    text = f"{TEXT} a zebra é日1234567\r\n\r\n x!!!\n"
    encoded = run_llama_cpp(tmp_path, text, [1], 1).encoded
    assert encoded == tokenizer.encode(text)
    assert (trained.size in encoded) == parts.ignore_merges
