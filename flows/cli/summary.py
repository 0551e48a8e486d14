"""The summary that ``textmill run`` prints."""

from typing import Any

from flows.report import format_figures
from flows.run_record import outputs_of
from tasks.runtime.context import RunContext


def format_sample(prompt: str, text: str) -> str:
    """Return a prompt and its continuation in one paragraph."""
    return f"\n> {prompt}|{text}"


def format_summary(record: dict[str, Any]) -> str:
    """Return one screen of text: the stages of a run, its outputs, and the next commands to try."""
    run, root = RunContext(record["root"], record["name"]), record["root"]
    outputs = outputs_of(run, record)
    lines = ["", f"{'stage':<10} {'state':<7} {'seconds':>8}  figures"]
    for name, output in outputs.items():
        figures = "  ".join(format_figures(output.manifest["figures"])).replace("`", "")
        stage = record["stages"][name]
        lines.append(f"{name:<10} {stage['state']:<7} {stage['seconds']:>8.1f}  {figures}")
    if "sample" in outputs:
        lines += [format_sample(**sample) for sample in outputs["sample"].json("samples.json")]
    lines += ["", "Outputs:"]
    if "merge" in outputs:
        lines.append(f"  tokenizer  {outputs['merge'].url}/tokenizer")
    trained = [outputs[name] for name in ("train", "sft", "preference", "reinforce") if name in outputs]
    for model in trained[-1:]:
        lines.append(f"  model      {model.url}/{model.json('training.json')['best']}")
        lines.append(f"  loss plot  {model.url}/loss.png")
    lines += [f"  report     {run.store.url('runs', run.name)}.md", "", "Try next:"]
    if "base" in outputs:
        lines.append(f"  textmill chat --root {root}    chat with the model")
        return "\n".join(lines)
    if "train" in outputs:
        lines.append(f'  textmill sample --root {root} --prompt "Once upon a time"')
    lines += [
        f"  textmill run --root {root} --data.train \"['your/text/*.txt']\"    train on your own text",
        f"  textmill plan --root {root} --train.steps 2000    show what a change would rerun, and why",
        "  textmill up    start Prefect's server with its UI, the deployments and a worker (in a checkout)",
    ]
    return "\n".join(lines)
