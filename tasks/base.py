"""Stage ``base``: the model that post-training starts from, with the tokens of the chat template."""

from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage
from tasks.sample import load_trained

_SEED = 0  # of the noise in new rows of the embedding


@stage("base")
def base(out: Attempt, model: Output, tokenizer: Output) -> None:
    """Write the best checkpoint of a training with a grown vocabulary, and the tokenizer."""
    import torch

    from lm.checkpoint.training_checkpoint import save_training, step_name
    from lm.data.chat_template import add_chat_tokens
    from lm.model.transformer import grow_vocabulary

    loaded_model, loaded_tokenizer = load_trained(model, tokenizer, "cpu")
    chat_tokenizer = add_chat_tokens(loaded_tokenizer)
    grow_vocabulary(loaded_model, chat_tokenizer.size, _SEED)
    chat_tokenizer.save(out.directory / "tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)  # a checkpoint holds the state of the generator
        save_training(out.directory / step_name(0), loaded_model, [], 0, {})
    out.write_json("training.json", {"best": step_name(0)})
    out.figures = {"vocab_size": chat_tokenizer.size, "context_length": loaded_model.config.context_length}
