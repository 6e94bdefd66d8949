"""The formats that chat data is published in, brought into the one form that chat templates take.

A line has its turns in a list (`messages` of `role` and `content`, `conversations` of `from` and `value`), or is one
question with its answer (`prompt` and `completion`, `instruction`, `input` and `output`, ...). What could mean two
things, or would change what is learnt if it were left out, is refused; other keys are listed as not used.
"""

from __future__ import annotations

from typing import Any

from chat_data import Conversation, Message
from chat_tools import tool_calls, tools_of
from options import InputError

EXPECTED = 'expected {"messages": [{"role": ..., "content": ...}, ...]}'

_LISTS = ("messages", "conversations", "conversation")
_QUESTIONS = ("prompt", "instruction", "question")
_MATERIALS = ("input", "context")
_ANSWERS = ("completion", "response", "output", "answer")
_SYSTEM = ("system", "system_prompt")
_FLAGS = ("weight", "train", "training", "loss")
"""Names for the mark of a turn that is to be learnt (1, true) or is context only (0, false)."""
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("tool", "ipython", "observation", "tool_response"), "tool"),
}
_REFUSED_MEDIA = dict.fromkeys(
    ("image", "images", "audio", "audios", "video", "videos"), "only text is learnt here: leave such lines out"
)
_REFUSED_IN_LINE = {
    **_REFUSED_MEDIA,
    "functions": "write them as 'tools'",
    "history": "write all turns as 'messages'",
    "documents": "write them into a turn",
    "chat_template_kwargs": "arguments of a template are not passed on: remove them",
    **dict.fromkeys(("weight", "train"), "put it on each turn instead"),
}
_REFUSED_IN_MESSAGE = {
    **_REFUSED_MEDIA,
    "function_call": "write it as 'tool_calls'",
    "refusal": "write it as 'content'",
    **dict.fromkeys(("train_detail", "training_detail"), "turns are learnt whole or not at all: remove it"),
}


def make_conversation(record: Any, source: str) -> Conversation:
    """The conversation that a line of a file stands for.

    Args:
        record: The line's JSON value.
        source: Where it stands.

    Raises:
        InputError: It is no conversation with a turn to learn; the text does not name the source.
    """
    if not isinstance(record, dict):
        raise InputError(f"no list of messages, {EXPECTED} on each line")
    given = _filled(record)  # a line that was a table's row has all columns
    _refuse(given, _REFUSED_IN_LINE)
    if isinstance(given.get("label"), bool):
        raise InputError("'label' marks good and bad answers, expected good ones only: drop the others, then 'label'")
    system, tools = _system(given), tools_of(given.pop("tools", None))
    lists, questions, answers = ([key for key in keys if key in given] for keys in (_LISTS, _QUESTIONS, _ANSWERS))
    if len(lists) == 1 and not (questions and answers):
        turns = _turns(given.pop(lists[0]), lists[0])
    elif not lists and len(questions) == len(answers) == 1:
        turns = _question_and_answer(given, questions[0], answers[0])
    elif lists or (questions and answers):
        raise InputError(f"{_names([*lists, *questions, *answers])} could each hold what is to be learnt, {EXPECTED}")
    else:
        raise InputError(f"no list of messages{_hint(given)}, {EXPECTED}")
    if system:
        if any(message["role"] == "system" for message, _ in turns):
            raise InputError("a system prompt beside the turns and one among them, expected one of the two")
        turns.insert(0, ({"role": "system", "content": system}, False))
    learnt = tuple(index for index, (_, learn) in enumerate(turns) if learn)
    if not any(message["role"] == "assistant" for message, _ in turns):
        raise InputError("no assistant turn, expected at least one: only those are learnt")
    if not learnt:
        raise InputError("no assistant turn to learn, expected one without 'weight': 0: remove the line otherwise")
    if learnt[0] == 0:
        raise InputError(
            "the first turn is the assistant's, expected a system or user turn before it: add one, remove the turn, or "
            "give it 'weight': 0"
        )
    return Conversation([message for message, _ in turns], source, learnt, tools, tuple(given))


def _turns(given: Any, key: str) -> list[tuple[Message, bool]]:
    """Each message with whether it is to be learnt."""
    if isinstance(given, str):
        raise InputError(f"no list of messages but a text under {key!r}, {EXPECTED}: decode the text")
    if not isinstance(given, list) or not given:
        raise InputError(f"no list of messages under {key!r}, {EXPECTED}")
    turns = []
    for number, message in enumerate(given, start=1):
        try:
            turns.append(_turn(message))
        except InputError as error:
            raise InputError(f"message {number} {error}") from None
    return turns


def _turn(given: Any) -> tuple[Message, bool]:
    if not isinstance(given, dict):
        raise InputError(f"is not an object, {EXPECTED}")
    given = _filled(given)
    _refuse(given, _REFUSED_IN_MESSAGE, "has ")
    role = _role(_one(given, ("role", "from")))
    content = _text(_one(given, ("content", "value")))
    learn = _flag(given)
    if learn and role != "assistant":
        raise InputError(f"has a weight, but the role {role!r}: only the assistant's turns are learnt, remove it")
    learn = role == "assistant" and learn is not False
    if "tool_calls" in given:
        if role != "assistant":
            raise InputError(f"has 'tool_calls', but the role {role!r}, expected them in the assistant's turns only")
        given["tool_calls"] = tool_calls(given["tool_calls"])
    elif content is None:
        raise InputError(f"has no text under 'content', {EXPECTED}")
    elif learn and not content.strip():
        raise InputError("is an empty answer, expected text under 'content': fill it in, or give it 'weight': 0")
    # keys that only some templates know, such as "reasoning_content", are theirs to show
    return {"role": role, "content": content or "", **given}, learn


def _one(given: dict[str, Any], keys: tuple[str, str]) -> Any:
    if all(key in given for key in keys):
        raise InputError(f"has both {keys[0]!r} and {keys[1]!r}, expected one of the two")
    return given.pop(keys[0], given.pop(keys[1], None))


def _role(given: Any) -> str:
    if not isinstance(given, str):
        raise InputError(f"has no text under 'role', {EXPECTED}")
    role = _ROLES.get(given.strip().lower())
    if role is None:
        remedy = " (write calls as 'tool_calls' of an assistant turn)" if "call" in given or "function" in given else ""
        raise InputError(f"has the role {given!r}, expected one of {', '.join(_ROLES)}{remedy}")
    return role


def _text(content: Any) -> str | None:
    """A message's content, which can also be a list of parts."""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise InputError(f"has a part of the type {kind!r} in 'content', expected text parts only")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise InputError(f"has no text under 'content', {EXPECTED}")
    try:
        (content or "").encode()
    except UnicodeEncodeError:
        raise InputError("has half a surrogate pair under 'content', expected text") from None
    return content


def _flag(given: dict[str, Any]) -> bool | None:
    """Whether a turn is marked as one to learn; None without a mark."""
    marks = {key: given.pop(key) for key in _FLAGS if key in given}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise InputError(f"has {key!r}: {value!r}, expected 0 or 1: a turn is learnt or not")
    if len(set(marks.values())) > 1:
        raise InputError(f"has {_names(marks)} that differ, expected one of them")
    return bool(next(iter(marks.values()))) if marks else None


def _system(given: dict[str, Any]) -> str:
    texts = [given.pop(key) for key in _SYSTEM if key in given]
    if len(texts) > 1 or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{_names(_SYSTEM)}: expected one of them, and a text")
    return texts[0] if texts and texts[0].strip() else ""


def _question_and_answer(given: dict[str, Any], question_key: str, answer_key: str) -> list[tuple[Message, bool]]:
    question, answer = given.pop(question_key), given.pop(answer_key)
    if isinstance(question, list) and isinstance(answer, list):  # messages, of which the first are context only
        asked = [(message, False) for message, _ in _turns(question, question_key)]
        return asked + _turns(answer, answer_key)
    materials = [key for key in _MATERIALS if key in given]
    if len(materials) > 1:
        raise InputError(f"{_names(materials)}: expected one of them")
    texts = [question, *(given.pop(key) for key in materials)]
    if not all(isinstance(text, str) for text in [*texts, answer]):
        raise InputError(
            f"{_names([question_key, *materials, answer_key])}: not all texts, expected texts, or {EXPECTED}"
        )
    prompt = "\n\n".join(text for text in texts if text.strip())
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return _turns(messages, "messages")


def _filled(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None and value != []}


def _refuse(given: dict[str, Any], refused: dict[str, str], prefix: str = "") -> None:
    for key, remedy in refused.items():
        if key in given:
            raise InputError(f"{prefix}{key!r}: {remedy}")


def _hint(given: dict[str, Any]) -> str:
    """What an object without a conversation might be."""
    if {"chosen", "rejected", "preferred_output"} & given.keys():
        return " but pairs of answers to prefer: write the better one as the assistant's turn"
    for key, value in given.items():
        if isinstance(value, dict) and value.keys() & {*_LISTS}:
            return f" but an object that has one under {key!r}: write that object alone on the line"
    return f" but {_names(given)}" if given else ""


def _names(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys)
