"""Pretraining: a Transformer learns to predict the next token of stories, in a training loop of a few lines.

``python examples/pretrain.py`` prints the loss on unseen stories, in bits per byte. Some ten seconds on two cores. The
full loop, with checkpoints and evaluations, is :class:`lm.train.Trainer`.
"""

import math

import numpy as np
import torch
from bpe import train_tokenizer

from lm.data import get_batch
from lm.model import ModelConfig, TransformerLM, cross_entropy
from lm.optim import AdamW, clip_grad_norm, lr_cosine_schedule
from lm.text import demo_stories
from lm.tokenizer import Tokenizer, token_dtype

STEPS, BATCH_SIZE, MAX_LR = 100, 16, 8e-3


def encode_stories(tokenizer: Tokenizer, stories: int, seed: int) -> np.ndarray:
    """Return the ids of stories, one after the other, as uint16."""
    ids = tokenizer.encode_iterable(demo_stories(stories, seed))
    return np.fromiter(ids, dtype=token_dtype(tokenizer.size))


def train_model(tokenizer: Tokenizer, steps: int = STEPS) -> TransformerLM:
    """Train a model of 0.3 million parameters."""
    torch.manual_seed(0)
    config = ModelConfig(tokenizer.size, context_length=64, d_model=96, num_layers=2, num_heads=4, d_ff=256)
    model = TransformerLM(config)
    optimizer = AdamW(model.parameters(), lr=MAX_LR, weight_decay=0.1)
    tokens = encode_stories(tokenizer, 4000, seed=0)
    generator = np.random.default_rng(0)
    for step in range(steps):
        x_BT, y_BT = get_batch(tokens, BATCH_SIZE, config.context_length, "cpu", generator)  # y is x, one token later
        loss = cross_entropy(model(x_BT), y_BT)
        loss.backward()
        clip_grad_norm(model.parameters(), max_norm=1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr_cosine_schedule(step, MAX_LR, MAX_LR / 10, warmup_iters=20, cosine_iters=steps)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"step {step:4}  loss {loss.item():.3f} nats per token")
    return model


@torch.no_grad()
def measure_bits_per_byte(model: TransformerLM, tokenizer: Tokenizer) -> float:
    """Return the loss on unseen stories. Unlike the loss per token, it can be compared between tokenizers."""
    tokens = encode_stories(tokenizer, 200, seed=1)
    x_BT, y_BT = get_batch(tokens, 128, 64, "cpu", np.random.default_rng(1))
    text_bytes = sum(len(tokenizer.vocab[token_id]) for token_id in y_BT.flatten().tolist())
    return cross_entropy(model(x_BT), y_BT).item() * y_BT.numel() / math.log(2) / text_bytes


def main() -> None:
    """Train a tokenizer and a model, and evaluate the model."""
    tokenizer = train_tokenizer()
    model = train_model(tokenizer)
    print(f"bits per byte: {measure_bits_per_byte(model, tokenizer):.3f}")


if __name__ == "__main__":
    main()
