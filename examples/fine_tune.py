"""Supervised fine-tuning: a model learns to answer, from prompts with their answers.

``python examples/fine_tune.py`` prints the share of sums that the model adds up correctly. Some ten seconds on two
cores. The flow ``posttrain`` does the same for dialogs, with :mod:`lm.posttrain.objectives.sft`.
"""

import random

import torch

from lm.inference import Generation, SampleConfig, generate
from lm.model import ModelConfig, TransformerLM
from lm.optim import AdamW
from lm.posttrain import get_response_log_probs, sft_microbatch_train_step, tokenize_prompt_and_output
from lm.text import END_OF_TEXT
from lm.tokenizer import Tokenizer

MAX_NUMBER = 10


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer without merges: each byte is a token."""
    return Tokenizer({i: bytes([i]) for i in range(256)}, [], [END_OF_TEXT])


def make_sums(count: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """Return prompts such as ``3+14=``, and their answers."""
    pairs = [(rng.randrange(MAX_NUMBER), rng.randrange(MAX_NUMBER)) for _ in range(count)]
    return [f"{a}+{b}=" for a, b in pairs], [str(a + b) for a, b in pairs]


def make_model(tokenizer: Tokenizer) -> TransformerLM:
    """Return a new model of 0.15 million parameters."""
    torch.manual_seed(0)
    return TransformerLM(
        ModelConfig(tokenizer.size, context_length=16, d_model=64, num_layers=2, num_heads=4, d_ff=192)
    )


def fine_tune(model: TransformerLM, tokenizer: Tokenizer, steps: int) -> None:
    """Train on the tokens of the answers; those of the prompts have no loss."""
    optimizer, rng = AdamW(model.parameters(), lr=6e-3), random.Random(0)
    for step in range(steps):
        prompts, answers = make_sums(64, rng)
        batch = tokenize_prompt_and_output(prompts, [answer + END_OF_TEXT for answer in answers], tokenizer)
        scores = get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=False)
        loss, _ = sft_microbatch_train_step(scores["log_probs"], batch["response_mask"], gradient_accumulation_steps=1)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.3f} nats per answer")


def answer(model: TransformerLM, tokenizer: Tokenizer, prompts: list[str], temperature: float = 0) -> list[str]:
    """Return the model's answer to each prompt, up to the end-of-text token."""
    config, stop_ids = SampleConfig(temperature=temperature, top_p=1), frozenset(tokenizer.special_ids.values())
    runs = [
        Generation(tokenizer.encode(prompt), 4, config, stop_ids, seed=index) for index, prompt in enumerate(prompts)
    ]
    generate(model, runs)
    return [tokenizer.decode(run.ids) for run in runs]


def measure_accuracy(model: TransformerLM, tokenizer: Tokenizer) -> float:
    """Return the share of sums that the model answers correctly."""
    prompts, answers = make_sums(200, random.Random(1))
    return sum(map(str.__eq__, answer(model, tokenizer, prompts), answers)) / len(answers)


def main() -> None:
    """Fine-tune a new model, and measure how well it adds."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    fine_tune(model, tokenizer, steps=150)
    print(f"accuracy: {measure_accuracy(model, tokenizer):.2f}")


if __name__ == "__main__":
    main()
