"""GRPO: a model improves by its own answers and a reward, without being shown the right ones (Shao et al. 2024).

``python examples/grpo.py`` prints the accuracy before and after. Some ten seconds on two cores. The flow
``posttrain`` does the same with :mod:`lm.posttrain.objectives.grpo`.
"""

import random

from fine_tune import answer, fine_tune, make_model, make_sums, make_tokenizer, measure_accuracy

from lm.optim import AdamW
from lm.posttrain import grpo_train_step
from lm.text import END_OF_TEXT

GROUP_SIZE, PROMPTS_PER_STEP, STEPS = 8, 16, 30


def reward(response: str, ground_truth: str) -> dict[str, float]:
    """Return 1 for the right answer, and 0 for any other."""
    is_right = float(response.removesuffix(END_OF_TEXT) == ground_truth)
    return {"reward": is_right, "format_reward": 1.0, "answer_reward": is_right}


def main() -> None:
    """Fine-tune a little, so that some answers are right, then train by reinforcement learning."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    fine_tune(model, tokenizer, steps=70)
    print(f"accuracy before: {measure_accuracy(model, tokenizer):.2f}")

    optimizer, rng = AdamW(model.parameters(), lr=5e-4, weight_decay=0), random.Random(2)
    for step in range(STEPS):
        prompts, truths = make_sums(PROMPTS_PER_STEP, rng)
        # Each prompt has a group of answers. The advantage of one is its reward compared with its group's.
        repeated_prompts = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
        repeated_truths = [truth for truth in truths for _ in range(GROUP_SIZE)]
        responses = answer(model, tokenizer, repeated_prompts, temperature=1.0)
        _, metadata = grpo_train_step(
            model,
            tokenizer,
            optimizer,
            gradient_accumulation_steps=1,
            max_grad_norm=1.0,
            reward_fn=reward,
            repeated_prompts=repeated_prompts,
            rollout_responses=[response + END_OF_TEXT for response in responses],
            repeated_ground_truths=repeated_truths,
            group_size=GROUP_SIZE,
        )
        if step % 10 == 0:
            print(f"step {step:4}  mean reward {metadata['reward_mean']:.2f}")
    print(f"accuracy after: {measure_accuracy(model, tokenizer):.2f}")


if __name__ == "__main__":
    main()
