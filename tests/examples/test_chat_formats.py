"""People's own chat files: every published format is read as it is meant, or refused with file, line and remedy."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_data import IGNORE_INDEX, Conversation, encode
from chat_files import read_conversations
from finetune_causal_lm import note_unused, written
from options import InputError

from .conftest import WORDS

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "d"}'}}
TOOL_TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "e"},
    {"role": "assistant", "content": "g"},
]
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<{{ 'user' if m.role == 'tool' else m.role }}> {{ m.content }} "
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.x }} {% endfor %}<end> "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Conversation]:
    """Reads one line, given as an object or as text, that stands in the third line of a file."""

    def read_line(line: Any) -> Conversation:
        path = tmp_path / "chats.jsonl"
        text = line if isinstance(line, str) else json.dumps(line)
        path.write_text(f"{json.dumps(GOOD)}\n\n{text}\n", encoding="utf-8")
        return read_conversations(path)[1]

    return read_line


@pytest.fixture
def refusal(read: Callable[..., Conversation], tmp_path: Path) -> Callable[[Any], str]:
    """The one-line complaint about a line, without the place that it names."""

    def complaint(line: Any) -> str:
        with pytest.raises(InputError) as caught:
            read(line)
        text = str(caught.value)
        place = f"{tmp_path / 'chats.jsonl'}:3: "
        assert text.startswith(place)
        assert "\n" not in text
        return text.removeprefix(place)

    return complaint


def turns(conversation: Conversation) -> list[str]:
    """The turns as `role: content`, with a star where they are learnt."""
    return [
        f"{message['role']}{'*' if index in conversation.learnt else ''}: {written(message)}"
        for index, message in enumerate(conversation.messages)
    ]


def chat(*messages: Any, **others: Any) -> dict[str, Any]:
    """A line of messages, each as `(role, content)` or whole."""
    whole = [{"role": m[0], "content": m[1]} if isinstance(m, tuple) else m for m in messages]
    return {"messages": whole, **others}


def answer(content: Any, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


# Read as it is meant


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # which turns are learnt
        (
            chat(("user", "a"), answer("b", weight=0), ("user", "c"), answer("d", weight=1)),
            ["user: a", "assistant: b", "user: c", "assistant*: d"],
        ),
        (chat(("user", "a"), answer("b", train=False), answer("d")), ["user: a", "assistant: b", "assistant*: d"]),
        (chat(answer("b", weight=0.0), ("user", "a"), answer("d")), ["assistant: b", "user: a", "assistant*: d"]),
        (chat(("user", "a"), answer("", weight=0), answer("d")), ["user: a", "assistant: ", "assistant*: d"]),
        # roles
        (chat((" USER", "a"), ("Assistant", "b")), ["user: a", "assistant*: b"]),
        (chat(("developer", "h"), ("human", "a"), ("model", "b")), ["system: h", "user: a", "assistant*: b"]),
        # contents
        (
            chat(("user", [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]), ("assistant", "c")),
            ["user: a b", "assistant*: c"],
        ),
        (chat(("user", "a\u2028b"), ("assistant", " b\n")), ["user: a\u2028b", "assistant*:  b\n"]),
        # tools, with OpenAI's arguments in a text
        (
            {"messages": TOOL_TURNS},
            ["user: a", 'assistant*: {"name": "f", "arguments": {"x": "d"}}', "tool: e", "assistant*: g"],
        ),
        (
            chat(("user", "a"), answer("b", tool_calls=[{"name": "f", "arguments": {}}])),
            ["user: a", 'assistant*: b\n{"name": "f", "arguments": {}}'],
        ),
        (chat(("user", "a"), answer("b", tool_calls=None, weight=None)), ["user: a", "assistant*: b"]),
        (chat(("user", "a"), answer("b", tool_calls=[])), ["user: a", "assistant*: b"]),
        # ShareGPT
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "h"},
            ["system: h", "user: a", "assistant*: b"],
        ),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "messages": None},
            ["user: a", "assistant*: b"],
        ),
        # one question, one answer
        ({"prompt": "a", "completion": "b"}, ["user: a", "assistant*: b"]),
        ({"instruction": "a", "input": "", "output": "b"}, ["user: a", "assistant*: b"]),
        ({"instruction": "a", "input": "c", "output": "b"}, ["user: a\n\nc", "assistant*: b"]),
        ({"instruction": "a", "context": "c", "response": "b"}, ["user: a\n\nc", "assistant*: b"]),
        ({"system_prompt": "h", "question": "a", "response": "b"}, ["system: h", "user: a", "assistant*: b"]),
        (
            {
                "prompt": [{"role": "user", "content": "a"}, answer("b"), {"role": "user", "content": "c"}],
                "completion": [answer("d")],
            },
            ["user: a", "assistant: b", "user: c", "assistant*: d"],
        ),
    ],
)
def test_a_usual_format_is_read_as_it_is_meant(
    read: Callable[..., Conversation], line: Any, expected: list[str]
) -> None:
    assert turns(read(line)) == expected


@pytest.mark.parametrize("content", ["\ufeff{0}\n{0}\n", "{0}\r\n{0}\r\n", "\n  \n{0}\n\n{0}", "{0}\r{0}"])
def test_marks_and_line_ends_of_editors(tmp_path: Path, content: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(content.replace("{0}", json.dumps(GOOD)).encode())
    assert [turns(conversation) for conversation in read_conversations(path)] == [["user: a", "assistant*: b"]] * 2


def test_tools_can_be_a_text(read: Callable[..., Conversation]) -> None:
    assert read({**GOOD, "tools": [TOOL]}).tools == [TOOL]
    assert read({**GOOD, "tools": json.dumps([TOOL])}).tools == [TOOL]
    assert read({**GOOD, "tools": ""}).tools is None
    assert read({**GOOD, "tools": []}).tools is None


# Refused: what it is, and what to change


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        # JSON that parsers read differently
        ('{"messages": [], "messages": [1]}', "the key 'messages' stands twice"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "content": "c"}]}',
            "the key 'content' stands twice",
        ),
        (json.dumps(GOOD)[:-1] + ', "score": NaN}', "not JSON (NaN is no JSON value"),
        (json.dumps(GOOD)[:-1] + ', "score": -Infinity}', "not JSON (-Infinity is no JSON value"),
        (json.dumps(GOOD)[:-1] + f', "id": {"1" * 5000}}}', "not JSON that can be read"),
        # which turns are learnt
        (chat(("user", "a"), answer("b", weight=0.5)), "message 2 has 'weight': 0.5, expected 0 or 1"),
        (chat(("user", "a"), answer("b", weight="0")), "message 2 has 'weight': '0', expected 0 or 1"),
        (chat(("user", "a"), answer("b", weight=0, train=True)), "message 2 has 'weight', 'train' that differ"),
        (chat(("user", "a"), answer("b", weight=0)), "no assistant turn to learn, expected one without 'weight': 0"),
        (
            chat({"role": "user", "content": "a", "weight": 1}, answer("b")),
            "message 1 has a weight, but the role 'user'",
        ),
        (chat(("user", "a"), answer("b"), weight=0), "'weight': put it on each turn"),
        (chat(("user", "a"), answer("b", train_detail=[])), None),
        (chat(("user", "a"), answer("b", train_detail=[{"train": False}])), "message 2 has 'train_detail': turns are"),
        (chat(answer("b"), ("user", "a"), answer("c")), "the first turn is the assistant's"),
        # roles
        (chat(("user", "a"), ("critic", "b")), "message 2 has the role 'critic', expected one of system,"),
        (chat(("user", "a"), ("function_call", "{}")), "message 2 has the role 'function_call', expected"),
        (chat(("system", "a")), "no assistant turn"),
        (chat({"role": "user", "from": "gpt", "content": "a"}), "message 1 has both 'role' and 'from'"),
        # contents
        (chat(("user", "a"), answer(None)), "message 2 has no text under 'content'"),
        (chat(("user", "a"), answer(" \n")), "message 2 is an empty answer"),
        (chat(("user", "a"), answer([])), "message 2 has no text under 'content'"),
        (chat(("user", None), answer("b")), "message 1 has no text under 'content'"),
        (
            chat(("user", [{"type": "image_url", "image_url": {"url": "x"}}]), answer("b")),
            "message 1 has a part of the type 'image_url'",
        ),
        (chat(("user", "a"), answer(None, refusal="no")), "message 2 has 'refusal': write it as 'content'"),
        # tools
        (chat(("user", "a"), answer(None, tool_calls=[])), "message 2 has no text under 'content'"),
        (chat(("user", "a"), answer(None, tool_calls="f()")), "message 2 has no list under 'tool_calls'"),
        (chat(("user", "a"), answer(None, tool_calls=[{"id": "1"}])), "message 2 has a tool call without a function"),
        (
            chat(("user", "a"), answer(None, tool_calls=[{"name": "f", "arguments": "{"}])),
            "message 2 calls 'f' with arguments that cannot be read: not JSON",
        ),
        (
            chat(("user", "a"), answer(None, tool_calls=[{"name": "f"}])),
            "message 2 calls 'f' without an object of arguments",
        ),
        (
            chat({"role": "user", "content": "a", "tool_calls": [CALL]}, answer("b")),
            "message 1 has 'tool_calls', but the role 'user'",
        ),
        (chat(("user", "a"), answer(None, function_call={"name": "f"})), "message 2 has 'function_call': write it as"),
        ({**GOOD, "functions": [{"name": "f"}]}, "'functions': write them as 'tools'"),
        ({**GOOD, "tools": "[1"}, "the text under 'tools' cannot be read: not JSON"),
        ({**GOOD, "tools": {"name": "f"}}, "no list of objects under 'tools'"),
        # formats
        ({"messages": json.dumps(GOOD["messages"])}, "no list of messages but a text under 'messages'"),
        ({"body": GOOD}, "no list of messages but an object that has one under 'body'"),
        ({"text": "a b"}, "no list of messages but 'text', expected"),
        ({**GOOD, "conversations": GOOD["messages"]}, "'messages', 'conversations' could each hold"),
        ({**GOOD, "prompt": "a", "completion": "b"}, "'messages', 'prompt', 'completion' could each hold"),
        ({"prompt": "a", "instruction": "c", "output": "b"}, "'prompt', 'instruction', 'output' could each hold"),
        ({"prompt": "a", "completion": ["b"]}, "'prompt', 'completion': not all texts"),
        ({"prompt": "a", "completion": ""}, "message 2 is an empty answer"),
        ({"prompt": "a", "completion": "b", "label": False}, "'label' marks good and bad answers"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "no list of messages but pairs of answers to prefer"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "'history': write all turns as 'messages'"),
        ({**GOOD, "image": "cat.jpg"}, "'image': only text is learnt"),
        ({**GOOD, "system": "h", "system_prompt": "g"}, "'system', 'system_prompt': expected one of them"),
        (
            chat(("system", "h"), ("user", "a"), ("assistant", "b"), system="g"),
            "a system prompt beside the turns and one among them",
        ),
    ],
)
def test_a_line_that_would_be_learnt_wrongly_is_refused(
    read: Callable[..., Conversation], refusal: Callable[[Any], str], line: Any, complaint: str | None
) -> None:
    if complaint is None:  # an empty mark says nothing
        read(line)
    else:
        assert refusal(line).startswith(complaint)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (gzip.compress(json.dumps(GOOD).encode()), ": compressed with gzip, unpack it first"),
        (b"PAR1\x15\x04", ": a Parquet file, write it as JSON lines first"),
        (json.dumps(GOOD).encode("utf-16"), ": UTF-16 text, save it as UTF-8"),
        (json.dumps([GOOD, GOOD]).encode(), ":1: no list of messages, expected"),
        (json.dumps([GOOD, GOOD], indent=2).encode(), ":1: not JSON (Expecting value at column 2)"),
        (json.dumps(GOOD, indent=2).encode(), ":1: not JSON (Expecting property name"),
    ],
    ids=["gzip", "parquet", "utf-16", "array", "indented array", "indented object"],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}{complaint}")
    assert ("jq -c" in str(caught.value)) == content.startswith(b"[")


# Which tokens are supervised, and what the template leaves out


def supervised(conversation: Conversation, tokenizer: Any) -> tuple[str, str]:
    """All tokens, and the same with dots for those without a label."""
    sample = encode(conversation, tokenizer, max_length=None)
    words = [WORDS[token] for token in sample.input_ids]
    return " ".join(words), " ".join("." if label == IGNORE_INDEX else WORDS[label] for label in sample.labels)


def test_a_turn_of_weight_0_is_context(read: Callable[..., Conversation], tokenizer: Any) -> None:
    line = chat(("user", "a"), answer("b", weight=0), ("user", "c"), answer("d"))
    assert supervised(read(line), tokenizer) == (
        "<user> a <end> <assistant> b <end> <user> c <end> <assistant> d <end>",
        ". . . . . . . . . . d <end>",
    )


class WithTemplate:
    """The tokenizer with another template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = template

    def apply_chat_template(self, messages: Any, **arguments: Any) -> Any:
        return self.tokenizer.apply_chat_template(messages, chat_template=self.template, **arguments)


def test_tools_and_calls_go_through_the_template(read: Callable[..., Conversation], tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "h", "parameters": {}}}
    conversation = read({"messages": TOOL_TURNS, "tools": [tool]})
    assert supervised(conversation, WithTemplate(tokenizer, TOOL_TEMPLATE)) == (
        "h <user> a <end> <assistant> f d <end> <user> e <end> <assistant> g <end>",
        ". . . . . f d <end> . . . . g <end>",
    )


@pytest.mark.parametrize(
    ("line", "template", "lost"),
    [
        ({**GOOD, "tools": [TOOL]}, None, "'tools'"),
        ({"messages": TOOL_TURNS}, None, "'tool_calls' of message 2"),
        (
            chat(("user", "a"), answer("", tool_calls=[CALL, CALL | {"function": {"name": "g", "arguments": {}}}])),
            TOOL_TEMPLATE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"),
            "'tool_calls' of message 2",
        ),
        (
            {"messages": TOOL_TURNS},
            TOOL_TEMPLATE.replace("in messages", "in messages if m.role != 'tool'"),
            "'content' of message 3",
        ),
    ],
    ids=["tools", "calls", "a second call", "results"],
)
def test_what_the_template_would_leave_out_is_refused(
    read: Callable[..., Conversation], tokenizer: Any, line: Any, template: str | None, lost: str
) -> None:
    conversation = read(line)
    with pytest.raises(InputError, match=f"^.*chats.jsonl:3: the model's chat template does not show {lost}"):
        encode(conversation, WithTemplate(tokenizer, template) if template else tokenizer, max_length=None)


def test_other_keys_that_leave_no_trace_are_said_once(
    read: Callable[..., Conversation], tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    line = chat(("user", "a"), answer("b", reasoning_content="c"), id=7, source="web", empty=None)
    plain = encode(read(line), tokenizer, max_length=None)
    assert plain.unused == ("id", "source", "reasoning_content (of a message)")

    template = "{% for m in messages %}{{ m.role }} {{ m.reasoning_content }} {{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    shown = encode(read(line), WithTemplate(tokenizer, template), max_length=None)  # type: ignore[arg-type]
    assert shown.unused == ("id", "source")

    note_unused([plain, shown])
    assert capsys.readouterr().err == (
        "Not used, of 2 conversations: id in 2, source in 2, reasoning_content (of a message) in 1\n"
    )
    note_unused([encode(read(GOOD), tokenizer, max_length=None)])
    assert capsys.readouterr().err == ""
