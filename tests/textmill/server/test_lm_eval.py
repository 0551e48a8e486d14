"""The evaluation harness lm-eval scores a served model as transformers scores the exported one."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.data.chat_template import add_chat_tokens
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.generating import make_model
from tests.helpers.serving import serve_app
from tests.helpers.tokenizers import make_tokenizer
from textmill.server.app import build_app

pytest.importorskip("lm_eval", reason="lm-eval, the evaluation harness, is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
for package in ("tenacity", "aiohttp", "requests"):
    pytest.importorskip(package, reason=f"{package}, which lm-eval needs for APIs, is not installed")

pytestmark = pytest.mark.slow

CONTEXT = 160
QUESTIONS = [
    {"question": "Once upon a time there was a", "choices": [" cat", " big dog", "n old tree"], "answer": 1},
    {"question": "Tom went to the", "choices": [" park", " moon.", " café"], "answer": 0},
    {"question": "The sun is", "choices": [" yellow", " 日本語", " very, very cold"], "answer": 2},
    {"question": "She said:", "choices": [' "No!"', " nothing"], "answer": 0},
]
TEXTS = [{"text": "Lily had a red ball. She was happy."}, {"text": "One day, Tom went to the park. " * 30}]
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "fewshot_split": "test",
        "num_fewshot": 2,
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "completion": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", ".", "!", "?", ";"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@dataclass(frozen=True)
class Served:
    """A served model, and the same model in transformers."""

    url: str
    model: Any
    tokenizer: Any
    directory: Path

    def log_likelihood(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, and whether each of its tokens is the most likely one."""
        with torch.no_grad():
            logits = self.model(torch.tensor([[*context, *continuation]])).logits[0].double()
        logprobs = logits.log_softmax(-1)[len(context) - 1 : -1]
        target = torch.tensor(continuation)
        total = logprobs.gather(-1, target[:, None]).sum()
        return float(total), bool((logprobs.argmax(-1) == target).all())

    def generate(self, ids: list[int], count: int, stops: list[str]) -> str:
        prompt = torch.tensor([ids])
        output = self.model.generate(prompt, max_new_tokens=count, do_sample=False, pad_token_id=0)
        text = self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        return str(text[: min([len(text), *(text.find(stop) for stop in stops if stop in text)])])


@pytest.fixture(scope="module", params=["plain", "chat"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve a random model. Its weights are large, so that its tokens are not equally likely."""
    tokenizer: Tokenizer = make_tokenizer(special_tokens=[END_OF_TEXT])
    if request.param == "chat":
        tokenizer = add_chat_tokens(tokenizer)
    model = make_model(tokenizer.size, CONTEXT, d_model=32, num_heads=4, num_kv_heads=2).eval()
    assert model.lm_head is not None
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    directory = tmp_path_factory.mktemp("exported")
    save_hugging_face(model, tokenizer, directory / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
    app = build_app(model, tokenizer, "tiny", 4, prefix_cache_bytes=10**7)
    with serve_app(app) as url:
        yield Served(url, theirs, their_tokenizer, directory / "model")


@pytest.fixture
def evaluate(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs lm-eval on tasks in local files, without a network."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets", reason="datasets, which lm-eval needs, is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    for name, config in TASKS.items():
        rows = TEXTS if name == "perplexity" else QUESTIONS
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        task = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **config,
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(task: str, model: str, path: str, options: dict[str, Any], **more: Any) -> tuple[Any, Any]:
        arguments = {"model": "tiny", "base_url": f"{served.url}/v1/{path}", "max_length": CONTEXT, **options}
        result = simple_evaluate(
            model=model,
            model_args=arguments,
            tasks=[f"local_{task}"],
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
            **more,
        )
        samples = sorted(result["samples"][f"local_{task}"], key=lambda sample: sample["doc_id"])
        return {name.split(",")[0]: value for name, value in result["results"][f"local_{task}"].items()}, samples

    return run


def arguments_of(sample: Any) -> list[Any]:
    """Return the arguments of a sample's requests."""
    requests = sample["arguments"]
    if isinstance(requests, dict):
        return [tuple(request.values()) for request in requests.values()]
    return list(requests)


def completions(served: Served, **more: Any) -> dict[str, Any]:
    return {"tokenizer": str(served.directory), "tokenizer_backend": "huggingface", **more}


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 1}, {"batch_size": 4}, {"num_concurrent": 3}, {"tokenized_requests": False}],
    ids=["one by one", "batches", "concurrent", "texts"],
)
def test_multiple_choice(served: Served, evaluate: Any, options: dict[str, Any]) -> None:
    results, samples = evaluate("choice", "local-completions", "completions", completions(served, **options))
    right, right_by_length = [], []
    for sample, doc in zip(samples, QUESTIONS, strict=True):
        scores = []
        choices: Any = doc["choices"]
        for (context, continuation), response in zip(arguments_of(sample), sample["filtered_resps"], strict=True):
            context_ids = served.tokenizer(context).input_ids
            ids = served.tokenizer(context + continuation).input_ids
            expected = served.log_likelihood(context_ids, ids[len(context_ids) :])
            assert float(response[0]) == pytest.approx(expected[0], abs=1e-4)
            assert bool(response[1]) is expected[1]
            scores.append(expected[0])
        assert len(scores) == len(choices)
        right.append(scores.index(max(scores)) == doc["answer"])
        by_length = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
        right_by_length.append(by_length.index(max(by_length)) == doc["answer"])
    assert results["acc"] == pytest.approx(sum(right) / 4)
    assert results["acc_norm"] == pytest.approx(sum(right_by_length) / 4)


def test_perplexity(served: Served, evaluate: Any) -> None:
    results, samples = evaluate("perplexity", "local-completions", "completions", completions(served))
    total = 0.0
    prefix = served.tokenizer.bos_token_id or served.tokenizer.eos_token_id
    window = CONTEXT - 2  # the harness keeps room for the context's token and for one new token
    for sample, doc in zip(samples, TEXTS, strict=True):
        ids = served.tokenizer(doc["text"]).input_ids
        expected = 0.0
        for start in range(0, len(ids), window):
            end = min(start + window, len(ids))
            first = max(0, end - window)
            context = [*([prefix] if first == 0 else [ids[first - 1]]), *ids[first:start]]
            expected += served.log_likelihood(context, ids[start:end])[0]
        assert float(sample["filtered_resps"][0]) == pytest.approx(expected, abs=1e-4 * max(1, len(ids) / window))
        total += expected
    assert len(ids) > 2 * window, "several windows"
    num_bytes = sum(len(doc["text"].encode()) for doc in TEXTS)
    assert results["bits_per_byte"] == pytest.approx(-total / num_bytes / torch.tensor(2.0).log().item(), rel=1e-5)


def test_generation(served: Served, evaluate: Any) -> None:
    _, samples = evaluate("completion", "local-completions", "completions", completions(served))
    stops = TASKS["completion"]["generation_kwargs"]["until"]
    for sample, doc in zip(samples, QUESTIONS, strict=True):
        expected = served.generate(served.tokenizer(doc["question"]).input_ids, 24, stops)
        assert sample["resps"][0][0] == expected


def test_chat(served: Served, evaluate: Any) -> None:
    if served.tokenizer.chat_template is None:
        pytest.skip("this model has no chat template")
    options = {"tokenizer_backend": None, "tokenized_requests": False}
    _, samples = evaluate(
        "completion", "local-chat-completions", "chat/completions", options, apply_chat_template=True, num_fewshot=1,
        fewshot_as_multiturn=True,
    )  # fmt: skip
    stops = TASKS["completion"]["generation_kwargs"]["until"][:4]  # the harness sends no more to chats
    for sample in samples:
        [messages] = [json.loads(argument[0][0]) for argument in arguments_of(sample)]
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        ids = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert sample["resps"][0][0] == served.generate(ids, 24, stops)
