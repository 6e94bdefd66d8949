"""Conversations, and how they become token ids of which only the assistant's are supervised.

Nothing here imports torch: a broken file is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from options import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
"""The label of a token that is not supervised, as Hugging Face models and `F.cross_entropy` have it."""

Message: TypeAlias = dict[str, Any]
"""A turn: `role`, `content`, for some turns `tool_calls`, and what else the data has for the chat template."""


@dataclass(frozen=True)
class Conversation:
    """The turns of one training example."""

    messages: list[Message]
    """Turns in order."""
    source: str
    """Where it comes from, for error texts: `file.jsonl:LINE` or `module.function`."""
    learnt: tuple[int, ...]
    """Indices of the assistant's turns to learn, at least one and not the first turn; all other turns are context."""
    tools: list[Any] | None = None
    """Functions that the assistant may call, as chat templates take them."""
    unused: tuple[str, ...] = ()
    """Keys of the line in the file that have no part in this."""


@dataclass(frozen=True)
class Sample:
    """One conversation as token ids."""

    input_ids: list[int]
    """All tokens."""
    labels: list[int]
    """The same tokens where they are supervised, `IGNORE_INDEX` elsewhere. Not shifted: the model does that."""
    conversation: Conversation
    """What it was made from."""
    unused: tuple[str, ...] = ()
    """Keys in the data that leave no trace in the tokens."""

    @property
    def first_answer(self) -> int:
        """Position of the first supervised token."""
        return next(position for position, label in enumerate(self.labels) if label != IGNORE_INDEX)


def hold_out(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Split into a training part and a validation part of every tenth conversation, beginning with the first."""
    training = [conversation for index, conversation in enumerate(conversations) if index % 10]
    return training, list(conversations[::10])


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Sample:
    """Token ids of a conversation through the model's chat template; only the turns to learn get labels.

    What the model has to write in an assistant's turn is what the template adds to "everything before it, and the
    opening of an answer" when it also gets that turn: the answer and the marks that end it.

    Args:
        conversation: The turns.
        tokenizer: A tokenizer with a chat template.
        max_length: Most tokens allowed; None for no limit.

    Raises:
        InputError: The template refuses the conversation, leaves a part of it out or rewrites earlier turns, or the
            sample is too long.
    """
    messages = conversation.messages
    input_ids = _apply_template(conversation, messages, tokenizer)
    labels = [IGNORE_INDEX] * len(input_ids)
    for index in conversation.learnt:
        before = _apply_template(conversation, messages[:index], tokenizer, add_generation_prompt=True)
        after = _apply_template(conversation, messages[: index + 1], tokenizer)
        start, end = len(before), len(after)
        if after[:start] != before or input_ids[:end] != after or start == end:
            raise InputError(
                f"{conversation.source}: the model's chat template changes what stands before turn {index + 1}, so its "
                "tokens cannot be told apart, expected a template that only appends"
            )
        labels[start:end] = input_ids[start:end]
    if max_length is not None and len(input_ids) > max_length:
        raise InputError(f"{conversation.source}: {len(input_ids)} tokens long, expected at most {max_length}")
    unused = (*conversation.unused, *_unused_keys(conversation, tokenizer))
    return Sample(input_ids, labels, conversation, unused)


def encode_fitting(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[Sample]:
    """Like `encode` for many conversations, one after the other as they are asked for; too long ones are left out."""
    for conversation in conversations:
        sample = encode(conversation, tokenizer, max_length=None)
        if len(sample.input_ids) <= max_length:
            yield sample


def _unused_keys(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Keys of messages that the template does not show; an error if what it leaves out is a part of the conversation.

    A part is shown if the text is another one without it. To apply the template costs little beside the tokenizing.
    """
    messages = conversation.messages
    text = _apply_template(conversation, messages, tokenizer, tokenize=False)

    def shows(others: list[Message], **arguments: Any) -> bool:
        try:
            return bool(_apply_template(conversation, others, tokenizer, tokenize=False, **arguments) != text)
        except InputError:
            return True  # the template needs what was taken away

    if conversation.tools and not shows(messages, tools=None):
        raise InputError(
            f"{conversation.source}: the model's chat template does not show 'tools', expected a model that was made "
            "for tools: take another one, or remove them"
        )
    unused = []
    for index, message in enumerate(messages):
        for key, without in _reduced(message):
            if shows([*messages[:index], without, *messages[index + 1 :]]):
                continue
            if key in ("content", "tool_calls", "tools"):
                raise InputError(
                    f"{conversation.source}: the model's chat template does not show {key!r} of message {index + 1}, "
                    "so it would be lost: take another model, or remove it"
                )
            unused.append(f"{key} (of a message)")
    return unused


def _reduced(message: Message) -> Iterator[tuple[str, Message]]:
    """The message without one of its parts, for each part that says something."""
    for key, value in message.items():
        if key == "content" and value.strip():
            yield key, {**message, "content": ""}
        elif key == "tool_calls" and len(value) > 1:
            for index in range(len(value)):
                yield key, {**message, key: value[:index] + value[index + 1 :]}
        elif key not in ("role", "content", "tool_call_id"):
            yield key, {name: other for name, other in message.items() if name != key}


def _apply_template(
    conversation: Conversation, messages: list[Message], tokenizer: PreTrainedTokenizerBase, **arguments: Any
) -> Any:
    """Token ids of some turns, or their text with `tokenize=False`."""
    arguments = {"tools": conversation.tools, "tokenize": True, **arguments}
    try:
        # not verbose: what is too long is reported by `encode`
        result = tokenizer.apply_chat_template(
            messages, return_dict=False, tokenizer_kwargs={"verbose": False}, **arguments
        )
    except Exception as error:  # a template is a program of the model's author: it can raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"{conversation.source}: refused by the model's chat template: {reason}") from error
    return result if isinstance(result, str) else list(result)
