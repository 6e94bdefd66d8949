"""Tools in chat data: the functions that an assistant may call, and its calls."""

from __future__ import annotations

from typing import Any

from options import InputError
from strict_json import parse_json


def tool_calls(given: Any) -> list[Any]:
    """Calls as templates take them: arguments are an object, not a text that holds one as in OpenAI's format.

    Args:
        given: What stands under `tool_calls` in a message.

    Raises:
        InputError: It is not a list of calls; the text goes on after the name of the message.
    """
    if not isinstance(given, list):
        raise InputError("has no list under 'tool_calls', expected [{\"function\": {...}}, ...]")
    calls = []
    for call in given:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError('has a tool call without a function, expected {"function": {"name": ..., ...}}')
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments)
            except InputError as error:
                raise InputError(f"calls {function['name']!r} with arguments that cannot be read: {error}") from None
        if not isinstance(arguments, dict):
            raise InputError(f"calls {function['name']!r} without an object of arguments, expected one, {{}} if empty")
        rest = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
        calls.append({"type": "function", **rest, "function": {**function, "arguments": arguments}})
    return calls


def tools_of(given: Any) -> list[Any] | None:
    """The functions that the assistant may call, None if there are none.

    Args:
        given: What stands under `tools` in a line: a list, or a text that holds one.

    Raises:
        InputError: It is neither.
    """
    if isinstance(given, str):
        try:
            given = parse_json(given) if given.strip() else None
        except InputError as error:
            raise InputError(f"the text under 'tools' cannot be read: {error}, expected a list of functions") from None
    if given is not None and (not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given)):
        raise InputError('no list of objects under \'tools\', expected [{"type": "function", "function": {...}}, ...]')
    return given or None
