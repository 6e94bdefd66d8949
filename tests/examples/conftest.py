"""A tiny model for the examples, and their modules made importable as they import each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
sys.path.insert(0, str(EXAMPLES))

WORDS = ["<unk>", "<pad>", "<user>", "<assistant>", "<system>", "<end>", *"abcdefgh"]
CONTEXT = 32
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def run_example(name: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run an example as a user does; on a timeout its processes end with it."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token per word; a turn is `<role> words <end>`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<end>", model_max_length=CONTEXT
    )
    result.chat_template = TEMPLATE
    return result


@pytest.fixture(scope="session")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two narrow layers with that tokenizer, as `save_pretrained` leaves it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=WORDS.index("<end>"),
        pad_token_id=WORDS.index("<pad>"),
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def write_chats(tmp_path: Path) -> Callable[..., Path]:
    """Writes `(role, content), ...` conversations to a file of JSON lines."""

    def write(name: str, *conversations: list[tuple[str, str]]) -> Path:
        path = tmp_path / name
        lines = [
            json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
            for turns in conversations
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
