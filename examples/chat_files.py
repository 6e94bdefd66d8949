"""A file of conversations: JSON lines, each of them one conversation."""

from __future__ import annotations

from pathlib import Path

from chat_data import Conversation
from chat_formats import EXPECTED, make_conversation
from options import InputError
from strict_json import parse_json

_EXPECTED_FILE = "expected a file of JSON lines in UTF-8"
_BINARY = {
    b"\x1f\x8b": "compressed with gzip, unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstd, unpack it first",
    b"PK\x03\x04": "a zip archive, unpack it first",
    b"PAR1": "a Parquet file, write it as JSON lines first",
    b"\xff\xfe": "UTF-16 text, save it as UTF-8",
    b"\xfe\xff": "UTF-16 text, save it as UTF-8",
}
"""What the first bytes of a file tell."""


def read_conversations(path: Path) -> list[Conversation]:
    """Read a file of JSON lines in one of the usual chat formats; blank lines are allowed.

    Args:
        path: The file.

    Raises:
        InputError: The file cannot be read, is empty, or a line is not a conversation with a turn to learn.
    """
    # not splitlines(): that also cuts at separators which JSON allows inside a string
    lines = enumerate(_read_text(path).split("\n"), start=1)
    conversations = [_parse_line(line, path, number) for number, line in lines if line.strip()]
    if not conversations:
        raise InputError(f"{path}: no conversation in it, {EXPECTED} on each line")
    return conversations


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}, {_EXPECTED_FILE}") from None
    for start, kind in _BINARY.items():
        if content.startswith(start):
            raise InputError(f"{path}: {kind}; {_EXPECTED_FILE}")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: not UTF-8 text, {_EXPECTED_FILE}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse_line(line: str, path: Path, number: int) -> Conversation:
    source = f"{path}:{number}"
    try:
        record = parse_json(line)
    except InputError as error:
        raise InputError(f"{source}: {error}, {EXPECTED}{_remedy(line, path, number)}") from None
    try:
        return make_conversation(record, source)
    except InputError as error:
        raise InputError(f"{source}: {error}{_remedy(line, path, number)}") from None


def _remedy(line: str, path: Path, number: int) -> str:
    """What to do with a file that is one array as a whole."""
    if number == 1 and line.lstrip().startswith("["):
        return f"; is the file one array? `jq -c '.[]' {path.name}` writes it as lines"
    return ""
