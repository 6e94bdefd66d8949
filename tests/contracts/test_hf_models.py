"""The names that `hf_models` has to know, against the installed transformers: a new exception fails here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from lightning_tokennorm.hf_models import _LOSS_IS_NOT_WHAT_THE_NAME_SAYS


def test_language_models_with_a_loss_that_is_not_shifted() -> None:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    classes: dict[str, str] = {}
    for path in Path(spec.origin).parent.glob("models/*/modeling_*.py"):
        for text in re.split(r"^class ", path.read_text(), flags=re.MULTILINE)[1:]:
            name = re.match(r"\w+", text)
            assert name is not None
            classes[name[0]] = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    assert len(classes) > 1000
    unshifted = set()
    for name, text in classes.items():
        forward = re.search(r"    def forward\(.*?(?=\n    def |\n    @|\Z)", text, re.DOTALL)
        if forward is None or not re.search(r"ForCausalLM|LMHead", name) or not re.search(r"\blabels\b", forward[0]):
            continue
        # The shared loss function shifts, and so does whoever cuts the first label off.
        if "self.loss_function" not in forward[0] and not re.search(r"labels\[[^\]]*\b1:", forward[0]):
            unshifted.add(name)
    known = {name for name, shift in _LOSS_IS_NOT_WHAT_THE_NAME_SAYS.items() if shift == 0}
    assert sorted(unshifted) == sorted(known & classes.keys())
