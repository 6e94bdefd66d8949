"""JSON as the standard has it: what Python's parser lets pass or decides by itself is refused."""

from __future__ import annotations

import json
from typing import Any

from options import InputError


def parse_json(text: str) -> Any:
    """The value that a text stands for.

    Raises:
        InputError: The text is not JSON, or an object in it has the same key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise InputError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise InputError("nested too deep") from None
    except ValueError:  # Python limits the digits of a whole number
        raise InputError("not JSON that can be read (a number has thousands of digits)") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the key {twice!r} stands twice in one object, so one of the two would be lost")
    return result


def _refuse(constant: str) -> Any:
    raise InputError(f"not JSON ({constant} is no JSON value, put null or a number)")
