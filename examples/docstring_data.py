"""The default data: functions of the standard library, and the docstrings that the model learns to write for them."""

from __future__ import annotations

import ast
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from chat_data import Conversation
from options import InputError


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
        yield Conversation(messages, f"{module.stem}.{node.name}", learnt=(1,))
