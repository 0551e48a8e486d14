"""Sampling: a trained model writes stories, one token after the other.

``python examples/sample.py`` trains the model of ``pretrain.py``, samples with and without a KV cache, and prints the
speed-up. Some ten seconds on two cores.
"""

import time

import torch
from bpe import train_tokenizer
from pretrain import train_model

from lm.inference import Generation, SampleConfig, generate
from lm.model import TransformerLM, softmax


@torch.no_grad()
def sample_naively(model: TransformerLM, prompt: list[int], new_tokens: int, config: SampleConfig) -> list[int]:
    """Return ``new_tokens`` sampled ids. Each step runs the model on the whole text again.

    Temperature scales the logits; top-p keeps the smallest set of tokens with at least that probability (Holtzman et
    al. 2020).
    """
    ids = list(prompt)
    for _ in range(new_tokens):
        logits_V = model(torch.tensor([ids]))[0, -1]
        probs_V, order_V = softmax(logits_V / config.temperature, dim=-1).sort(descending=True)
        is_kept_V = probs_V.cumsum(0) - probs_V < config.top_p
        choice = torch.multinomial(probs_V * is_kept_V, 1)
        ids.append(int(order_V[choice]))
    return ids[len(prompt) :]


def main() -> None:
    """Sample text by both ways, and compare greedy decoding, which has to agree."""
    tokenizer = train_tokenizer()
    model = train_model(tokenizer, steps=60).eval()
    prompt, config = tokenizer.encode("Once upon a time"), SampleConfig(temperature=0.8, top_p=0.95)
    started = time.perf_counter()
    naive = sample_naively(model, prompt, 50, config)
    naive_seconds = time.perf_counter() - started
    print("without a cache:", tokenizer.decode(naive))

    # The engine keeps the keys and values of earlier tokens, and runs a batch of texts.
    generate(model, [Generation(prompt, 1)])  # prepares the model
    started = time.perf_counter()
    cached = Generation(prompt, 50, config)
    generate(model, [cached])
    print("with a cache:", tokenizer.decode(cached.ids))
    print(f"speed-up: {naive_seconds / (time.perf_counter() - started):.1f}")

    greedy = Generation(prompt, 40, SampleConfig(temperature=0))
    generate(model, [greedy])
    nearly_greedy = sample_naively(model, prompt, 40, SampleConfig(temperature=1e-6, top_p=1))
    agreement = sum(a == b for a, b in zip(greedy.ids, nearly_greedy, strict=True)) / 40
    print(f"greedy agreement: {agreement:.2f}")


if __name__ == "__main__":
    main()
