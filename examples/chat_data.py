"""Conversations: where they come from, and how they become token ids of which only the assistant's are supervised.

Nothing here imports torch: a broken file is reported at once.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from options import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
"""The label of a token that is not supervised, as Hugging Face models and `F.cross_entropy` have it."""

Message: TypeAlias = dict[str, str]

_EXPECTED_LINE = 'expected {"messages": [{"role": ..., "content": ...}, ...]}'


@dataclass(frozen=True)
class Conversation:
    """The turns of one training example."""

    messages: list[Message]
    """Turns in order, each with a `role` and a `content`; at least one is the assistant's, and not the first."""
    source: str
    """Where it comes from, for error texts: `file.jsonl:LINE` or `module.function`."""

    @property
    def first_answer(self) -> int:
        """Index of the first message that is the assistant's."""
        return next(index for index, message in enumerate(self.messages) if message["role"] == "assistant")


@dataclass(frozen=True)
class Sample:
    """One conversation as token ids."""

    input_ids: list[int]
    """All tokens."""
    labels: list[int]
    """The same tokens where they are supervised, `IGNORE_INDEX` elsewhere. Not shifted: the model does that."""
    conversation: Conversation
    """What it was made from."""

    @property
    def first_answer(self) -> int:
        """Position of the first supervised token."""
        return next(position for position, label in enumerate(self.labels) if label != IGNORE_INDEX)


# From a file


def read_conversations(path: Path) -> list[Conversation]:
    """Read a file of JSON lines in the usual chat format; blank lines are allowed.

    Args:
        path: The file.

    Raises:
        InputError: The file cannot be read, is empty, or a line is not a conversation with an assistant's turn.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text, expected a file of JSON lines") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}, expected a file of JSON lines") from None
    # not splitlines(): that also cuts at separators which JSON allows inside a string
    lines = enumerate(text.split("\n"), start=1)
    conversations = [_parse_line(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not conversations:
        raise InputError(f"{path}: no conversation in it, {_EXPECTED_LINE} on each line")
    return conversations


def _parse_line(line: str, source: str) -> Conversation:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{source}: not JSON ({error.msg} at column {error.colno}), {_EXPECTED_LINE}") from None
    except RecursionError:
        raise InputError(f"{source}: nested too deep, {_EXPECTED_LINE}") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{source}: no list of messages, {_EXPECTED_LINE}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise InputError(f"{source}: message {number} is not an object, {_EXPECTED_LINE}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InputError(f"{source}: message {number} has no text under {key!r}, {_EXPECTED_LINE}")
            if not _is_unicode(message[key]):
                raise InputError(f"{source}: message {number} has half a surrogate pair under {key!r}, expected text")
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise InputError(f"{source}: no assistant turn, expected at least one: only those are learnt")
    if roles[0] == "assistant":
        raise InputError(f"{source}: the first turn is the assistant's, expected a system or user turn before it")
    return Conversation(messages, source)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def hold_out(conversations: Sequence[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Split into a training part and a validation part of every tenth conversation, beginning with the first."""
    training = [conversation for index, conversation in enumerate(conversations) if index % 10]
    return training, list(conversations[::10])


# From the standard library


def standard_library_conversations() -> tuple[list[Conversation], list[Conversation]]:
    """Pairs (function without its docstring -> docstring) from the modules of the running Python's standard library.

    Every eighth module is held out whole, so no function is validated whose neighbours were trained on. The result
    depends on nothing but the Python installation: all ranks collect the same.

    Returns:
        Conversations for training and for validation, in the order of module and line.

    Raises:
        InputError: This Python comes without the source of its standard library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names)
    training: list[Conversation] = []
    validation: list[Conversation] = []
    seen: set[str] = set()
    for index, module in enumerate(modules):
        part = training if index % 8 else validation
        for conversation in _docstring_conversations(module):
            prompt = conversation.messages[0]["content"]
            if prompt not in seen:  # some functions stand in several modules
                seen.add(prompt)
                part.append(conversation)
    if not training or not validation:
        raise InputError(f"{folder}: no source of the standard library here, use --data FILE instead")
    return training, validation


def _docstring_conversations(module: Path) -> Iterator[Conversation]:
    try:
        source = module.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return  # a module that this Python cannot read is no loss
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue  # without a body there is nothing to describe
        docstring, statement = node.body[0], node.body[1]
        # a docstring that shares a line with code cannot be cut out by lines
        if not (ast.get_docstring(node) or "").strip() or docstring.end_lineno is None or node.end_lineno is None:
            continue
        if docstring.lineno <= node.lineno or statement.lineno <= docstring.end_lineno:
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        kept = lines[first - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
        function = textwrap.dedent("\n".join(kept))
        question = f"Write the docstring of this function:\n\n{function}"
        answer = (ast.get_docstring(node) or "").strip()
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield Conversation(messages, f"{module.stem}.{node.name}")


# To token ids


def encode(conversation: Conversation, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> Sample:
    """Token ids of a conversation through the model's chat template; only the assistant's turns get labels.

    What the model has to write in an assistant's turn is what the template adds to "everything before it, and the
    opening of an answer" when it also gets that turn: the answer and the marks that end it.

    Args:
        conversation: The turns.
        tokenizer: A tokenizer with a chat template.
        max_length: Most tokens allowed; None for no limit.

    Raises:
        InputError: The template refuses the conversation or rewrites earlier turns, or the sample is too long.
    """
    input_ids = _apply_template(conversation, len(conversation.messages), tokenizer)
    labels = [IGNORE_INDEX] * len(input_ids)
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        before = _apply_template(conversation, index, tokenizer, add_generation_prompt=True)
        after = _apply_template(conversation, index + 1, tokenizer)
        start, end = len(before), len(after)
        if after[:start] != before or input_ids[:end] != after or start == end:
            raise InputError(
                f"{conversation.source}: the model's chat template changes what stands before turn {index + 1}, so its "
                "tokens cannot be told apart, expected a template that only appends"
            )
        labels[start:end] = input_ids[start:end]
    if max_length is not None and len(input_ids) > max_length:
        raise InputError(f"{conversation.source}: {len(input_ids)} tokens long, expected at most {max_length}")
    return Sample(input_ids, labels, conversation)


def encode_fitting(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[Sample]:
    """Like `encode` for many conversations, one after the other as they are asked for; too long ones are left out."""
    for conversation in conversations:
        sample = encode(conversation, tokenizer, max_length=None)
        if len(sample.input_ids) <= max_length:
            yield sample


def _apply_template(
    conversation: Conversation, num_messages: int, tokenizer: PreTrainedTokenizerBase, **arguments: Any
) -> list[int]:
    messages = conversation.messages[:num_messages]
    try:
        # not verbose: what is too long is reported by `encode`
        ids = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=False, tokenizer_kwargs={"verbose": False}, **arguments
        )
    except Exception as error:  # a template is a program of the model's author: it can raise anything
        reason = " ".join(str(error).split())
        raise InputError(f"{conversation.source}: refused by the model's chat template: {reason}") from error
    return list(ids)
