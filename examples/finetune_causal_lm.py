"""Fine-tune a causal language model on several processes, with every supervised token weighing the same.

    python examples/finetune_causal_lm.py
    python examples/finetune_causal_lm.py --model ./my-model --data chats.jsonl --output runs/chats
    python examples/finetune_causal_lm.py --report
    python examples/finetune_causal_lm.py --help

Without options a real pretrained model, SmolLM2-135M-Instruct, learns to write the docstrings of Python's standard
library. The run's folder gets `metrics.csv`, `loss.png` and `model/`, which `from_pretrained` loads.

Read on in `causal_lm.py` (module, data and Trainer: this is where `TokenNormDDP` comes in), `chat_data.py`
(conversations to labelled tokens), `chat_files.py` and `chat_formats.py` (your own data), `docstring_data.py` and
`smollm2.py` (the default data and model), `report.py` (plot and table) and `options.py`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from chat_data import Conversation, Message, Sample, encode, encode_fitting, hold_out
from chat_files import read_conversations
from docstring_data import standard_library_conversations
from options import InputError, Options, parse_options
from smollm2 import new_folder, smollm2_folder

if TYPE_CHECKING:
    from causal_lm import Outcome
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lightning_tokennorm.weights import TokenWeightReport

DEFAULT_MAX_LENGTH = 96
"""Longest conversation of the default data, in tokens: short functions, so that two CPU cores need minutes only."""
DEFAULT_VALIDATION_SAMPLES = 24
"""Conversations of the default data to validate on: few, for the same reason."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after the program's name; taken from the process if None.

    Returns:
        The exit status: 0, or 2 if something that the user gave cannot be used.
    """
    try:
        run(parse_options(arguments))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(options: Options) -> None:
    """Check everything the user gave, then train, then report.

    Lightning starts the other ranks from within rank zero by running this script again, so all ranks pass here and
    prepare the same data. Only rank zero writes, and not before all checks have passed.

    Raises:
        InputError: Something that the user gave cannot be used; nothing was created.
    """
    start = time.monotonic()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else it warns whenever a process starts
    # what is slow to import comes after the checks that do not need it: a mistake is reported at once
    if is_first_process():
        check_output(options.output)
    training, validation = load_conversations(options)

    from causal_lm import finetune, num_devices
    from pretrained import load_model, load_tokenizer

    devices = num_devices(options)
    model_name = options.model or str(smollm2_folder())
    tokenizer, context = load_tokenizer(model_name)
    train_samples, val_samples = encode_all(training, validation, tokenizer, context, devices, options)
    if options.report:
        print(weights(train_samples, devices, options))
        return
    model = load_model(model_name)
    if is_first_process():
        create_output(options.output)
        note_unused(train_samples + val_samples)
    outcome = finetune(model, tokenizer, train_samples, val_samples, devices, options)
    if outcome.is_rank_zero:
        report(outcome, options, model, tokenizer, val_samples[0].conversation, start)


def is_first_process() -> bool:
    """Whether this is rank zero on this machine, known before Lightning is imported; launchers set the variable."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def check_output(folder: Path) -> None:
    """Refuse a folder that holds something already.

    Raises:
        InputError: It does.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder}: is a file, expected a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"--output {folder}: holds files already, expected a new or empty folder")


def create_output(folder: Path) -> None:
    """Create the run's folder.

    Raises:
        InputError: That is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {folder}: cannot be created ({error.strerror})") from None


def load_conversations(options: Options) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations for training and for validation.

    Raises:
        InputError: A file is missing or broken.
    """
    if options.data is None:
        parts = standard_library_conversations()
        for part in parts:
            random.Random(options.seed).shuffle(part)
        return parts
    conversations = read_conversations(options.data)
    if options.val_data is not None:
        return conversations, read_conversations(options.val_data)
    return hold_out(conversations)


def encode_all(
    training: list[Conversation],
    validation: list[Conversation],
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    devices: int,
    options: Options,
) -> tuple[list[Sample], list[Sample]]:
    """Token ids of the conversations: of all that are in a file, of as many as needed of the default data.

    Raises:
        InputError: A conversation is too long, the chat template does not fit, or a rank would have nothing to do.
    """
    longest = min(limit for limit in (context, options.max_length, sys.maxsize) if limit is not None)
    if options.data is None:
        longest = min(longest, options.max_length or DEFAULT_MAX_LENGTH)
        needed = options.steps * options.accumulate * options.micro_batch * devices
        train_samples = list(islice(encode_fitting(training, tokenizer, longest), needed))
        val_samples = list(islice(encode_fitting(validation, tokenizer, longest), DEFAULT_VALIDATION_SAMPLES))
    else:
        train_samples = [encode(conversation, tokenizer, longest) for conversation in training]
        val_samples = [encode(conversation, tokenizer, longest) for conversation in validation]
    if min(len(train_samples), len(val_samples)) < devices:
        raise InputError(
            f"{options.data or 'the default data'}: {len(train_samples)} conversations to train on and "
            f"{len(val_samples)} to validate on, expected at least one of each for each of the {devices} ranks"
        )
    return train_samples, val_samples


def weights(samples: Sequence[Sample], devices: int, options: Options) -> TokenWeightReport:
    """How plain DDP would weigh the tokens of the updates that a run with these options makes in its first epoch."""
    from causal_lm import ChatData

    from lightning_tokennorm import token_weight_report

    data = ChatData(samples, [], options.micro_batch, pad_id=0, seed=options.seed)
    return token_weight_report(
        data.micro_batches_of_all_ranks(devices),
        accumulate=options.accumulate,
        world_size=devices,
        windows=options.steps,
    )


def note_unused(samples: Sequence[Sample]) -> None:
    """Say once what is in the data and takes no part in the training."""
    counts = Counter(key for sample in samples for key in dict.fromkeys(sample.unused))
    if counts:
        keys = ", ".join(f"{key} in {count}" for key, count in counts.most_common())
        print(f"Not used, of {len(samples)} conversations: {keys}", file=sys.stderr, flush=True)


def report(
    outcome: Outcome,
    options: Options,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: Conversation,
    start: float,
) -> None:
    """Save the model and the plot, print the answers and the table.

    Args:
        outcome: What the run has to tell.
        options: What the user asked for.
        model: The trained model.
        tokenizer: Its tokenizer.
        conversation: The one that was answered before and after the training.
        start: When the program started, on the monotonic clock.
    """
    from report import Curves, plot, table

    with new_folder(options.output / "model") as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    name = Path(options.model).name if options.model else "SmolLM2-135M-Instruct"
    ranks = f"{outcome.world_size} {'GPU' if outcome.on_gpu else 'CPU process'}"
    if outcome.world_size > 1:
        ranks += "s" if outcome.on_gpu else "es"
    curves = Curves.read(options.output / "metrics.csv")
    plot(curves, f"{name} on {ranks}", options.output / "loss.png")

    messages, first = conversation.messages, conversation.learnt[0]
    for title, text in (
        (f"Prompt ({conversation.source})", written(messages[first - 1])),
        ("Its answer in the data", written(messages[first])),
        ("The model's answer before the training", outcome.answer_before),
        ("The model's answer after the training", outcome.answer_after),
    ):
        print(f"\n{title}:\n" + textwrap.indent(text, "    "))
    tokens = curves.num_tokens
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    rows = [
        ("model", f"{name}, {len(tokens)} updates on {ranks}"),
        ("validation loss per token", f"{curves.val_loss[0]:.4f} before, {curves.val_loss[-1]:.4f} after"),
        (
            "supervised tokens per update (N)",
            f"{min(tokens)} min, {statistics.median(tokens):g} median, {max(tokens)} max",
        ),
        ("supervised tokens/s", f"{sum(tokens) / outcome.training_seconds:.1f}"),
        ("all tokens/s, without padding", f"{outcome.tokens_per_second:.1f}"),
        ("wall time", f"{minutes} min {seconds} s"),
        ("written to", f"{options.output}: metrics.csv, loss.png, model/"),
    ]
    print("\n" + table(rows))


def written(message: Message) -> str:
    """What a turn says, for people."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
    return "\n".join([message["content"], *calls] if message["content"] else calls)


if __name__ == "__main__":
    sys.exit(main())
