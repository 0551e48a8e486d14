"""Stage ``evaluate``: compare the models before and after each step of post-training."""

from contextlib import nullcontext
from dataclasses import asdict

from lm.posttrain.config import ComparisonConfig, reward_weights
from tasks.pages import posttrain as pages
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage
from tasks.sample import load_trained


@stage("evaluate", page=pages.evaluate)
def evaluate(
    out: Attempt,
    models: list[Output],
    tokenizer: Output,
    data: Output,
    rewards: dict[str, float],
    reward_seconds: float,
    config: ComparisonConfig,
    libraries: dict[str, str] | None = None,
) -> None:
    """Write ``answers.json``: the greedy responses of each model to the prompts of the config and to the problems.

    ``libraries``: versions of those that compute rewards, for the key.
    """
    from lm.data.dialogs import Dialog
    from lm.eval.problems import Problem
    from lm.eval.reward_worker import RewardWorker
    from lm.posttrain.comparison import compare_model
    from lm.posttrain.data import read_example_rows

    dialogs = read_example_rows(data.path("dialogs-valid.jsonl"), Dialog)
    problems = read_example_rows(data.path("problems-test.jsonl"), Problem)
    weights = reward_weights(rewards, data.json("examples.json")["reward"]) if problems else {}
    content = {}
    with RewardWorker(weights, reward_seconds) if weights else nullcontext() as reward:
        for output in models:
            model, loaded_tokenizer = load_trained(output, tokenizer, out.run.execution.device)
            evaluation = compare_model(model, loaded_tokenizer, dialogs, problems, reward, config)
            out.figures[output.ref.stage] = evaluation.figures
            responses = [asdict(response) for response in evaluation.responses]
            content[output.ref.stage] = {"samples": evaluation.samples, "responses": responses}
    out.write_json("answers.json", content, ensure_ascii=False, indent=1)
