"""The benchmark: its quick mode runs, and what it counts is what the package promises. No time is ever asserted."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarking.contestants import (
    BY_HAND,
    FSDP2_BY_HAND,
    FSDP_BY_HAND,
    ONCE,
    PLAIN,
    PLAIN_FSDP,
    PLAIN_FSDP2,
    SIGTERM_KEPT,
    TOKENNORM,
    TOKENNORM_FSDP,
    TOKENNORM_FSDP2,
    contestants,
    host_contestants,
)
from benchmarking.page import fill, marks
from benchmarking.presets import MODES, QUICK

from .conftest import REPOSITORY, run_example

MAX_BYTES = 128
"""What an exchange may send per rank."""


def run_benchmark(*arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return run_example("benchmark.py", *arguments, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a quick run of all modes leaves."""
    folder = tmp_path_factory.mktemp("benchmark") / "quick"
    page = folder.parent / "page.md"
    page.write_text("# A page\n\n{}\nof an earlier run\n{}\n\nThe end\n".format(*marks("hosts")))
    done = run_benchmark("--quick", "--out", str(folder), "--page", str(page), timeout_s=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[overhead]" in done.stdout
    assert f"Written to {folder}" in done.stdout
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return loaded


def rows(results: dict[str, Any], mode: str, **wanted: Any) -> list[dict[str, Any]]:
    """The rows of a mode with these values; there has to be one."""
    found = [row for row in results["modes"][mode]["rows"] if all(row[key] == wanted[key] for key in wanted)]
    assert found, f"no row of {mode} has {wanted}"
    return found


def collectives(row: dict[str, Any], where: str) -> Counter[tuple[str, int]]:
    """How often each kind and size occurs in a window."""
    return Counter(
        {(entry["op"], entry["bytes"]): entry["count"] for entry in row["collectives"] if entry["where"] == where}
    )


def test_what_a_run_leaves(folder: Path, results: dict[str, Any]) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["results.json", "tables.md", *(f"{mode}.png" for mode in MODES)]
    )
    assert all((folder / f"{mode}.png").read_bytes().startswith(b"\x89PNG") for mode in MODES)
    assert results["command"].startswith("examples/benchmark.py --quick")
    assert results["preset"] == "quick"
    assert {"date", "machine"} <= results.keys()
    assert {"cpu", "cores", "torch", "lightning"} <= results["machine"].keys()
    assert list(results["modes"]) == list(MODES)


def test_every_contestant_is_in_every_comparison(results: dict[str, Any]) -> None:
    everybody = [contestant.name for contestant in contestants()]
    for mode, names in (("overhead", everybody), ("loader", everybody), ("accumulation", [PLAIN, TOKENNORM])):
        found = rows(results, mode)
        assert len(found) > 0
        assert [row["contestant"] for row in found] == names * (len(found) // len(names))
        for row in found:
            for spread in (row["update_ms"], row["ratio_to_plain"], row["peak_memory_mb"]):
                assert spread["q1"] <= spread["median"] <= spread["q3"]


@pytest.mark.parametrize(("precision", "bound"), [("32-true", 2e-6), ("bf16-mixed", 2e-2)])
def test_a_window_has_the_gradient_of_the_whole_batch(results: dict[str, Any], precision: str, bound: float) -> None:
    for row in rows(results, "correctness", precision=precision, contestant=TOKENNORM):
        assert row["relative_l2"] < bound
    for row in rows(results, "correctness", precision=precision, contestant=PLAIN):
        assert row["relative_l2"] > 0.05, "the negative control"


@pytest.mark.parametrize("accumulate", QUICK.accumulates)
def test_one_small_collective_per_window(results: dict[str, Any], accumulate: int) -> None:
    by_name = {row["contestant"]: row for row in rows(results, "overhead", model="transformer", accumulate=accumulate)}
    plain, ours, by_hand = by_name[PLAIN], by_name[TOKENNORM], by_name[BY_HAND]

    # gradients are reduced once per window, in the same buckets as by plain DDP
    assert collectives(ours, "buckets") == collectives(plain, "buckets")
    assert sum(collectives(plain, "buckets").values()) == 1
    # outside there is one more than what plain Lightning sends, of which we may leave out but not add
    (exchange,) = collectives(ours, "outside") - collectives(plain, "outside")
    assert collectives(ours, "outside")[exchange] == 1
    assert exchange[0] == "allgather"
    assert 0 < exchange[1] <= MAX_BYTES
    kept = collectives(by_name[SIGTERM_KEPT], "outside")
    assert kept == collectives(plain, "outside") + Counter([exchange])
    # the loop by hand shows that the counter sees what is there: one float32
    assert collectives(by_hand, "outside") == {("allreduce", 4): 1}


@pytest.mark.parametrize("accumulate", QUICK.accumulates)
def test_gradients_against_float64(results: dict[str, Any], accumulate: int) -> None:
    for row in rows(results, "overhead", model="transformer", accumulate=accumulate):
        error = row["gradient_error"]["relative_l2"]
        if row["contestant"] == PLAIN:
            assert error > 0.01, "the negative control"
        else:
            assert error < 2e-6


def sent(results: dict[str, Any], contestant: str, accumulate: int) -> dict[str, dict[str, int]]:
    """What an update of the mode `hosts` sends, by kind."""
    (row,) = rows(results, "hosts", contestant=contestant, accumulate=accumulate)
    kinds: dict[str, dict[str, int]] = row["sent"]
    return kinds


BLOCK, REST = 4 * 3280, 4 * 1568
"""Bytes of the quick model's two parts, in float32. With hidden states of 16 the block has two norms of 32, qkv of
16 * 48 + 48, out of 16 * 16 + 16, and ffn of 16 * 64 + 64 and 64 * 16 + 16; the rest has two embeddings and a head of
32 * 16, and a norm of 32."""


@pytest.mark.parametrize("accumulate", QUICK.hosts_accumulates)
def test_what_each_host_sends(results: dict[str, Any], accumulate: int) -> None:
    whole = {"count": 1, "bytes": BLOCK + REST}
    once = {"count": 2, "bytes": BLOCK + REST}
    each = {"count": 2 * accumulate, "bytes": accumulate * (BLOCK + REST)}
    # Both parts are gathered in each forward, and the block again in each backward; a rank puts in its half.
    gathered = {"count": 3 * accumulate, "bytes": accumulate * (2 * BLOCK + REST) // 2}
    none = {"count": 0, "bytes": 0}
    for gradients, parameters, names in (
        (whole, none, (PLAIN, TOKENNORM, BY_HAND)),
        # whatever has a `no_sync` is held back by Lightning, FSDP too
        (once, gathered, (PLAIN_FSDP, TOKENNORM_FSDP + ONCE, FSDP_BY_HAND + ONCE)),
        (each, gathered, (TOKENNORM_FSDP, FSDP_BY_HAND)),
        (once, gathered, (TOKENNORM_FSDP2 + ONCE, FSDP2_BY_HAND + ONCE)),
        (each, gathered, (PLAIN_FSDP2, TOKENNORM_FSDP2, FSDP2_BY_HAND)),
    ):
        for name in names:
            found = sent(results, name, accumulate)
            assert (found["gradients"], found["parameters"]) == (gradients, parameters), name


@pytest.mark.parametrize("accumulate", QUICK.hosts_accumulates)
def test_each_host_sends_one_row_besides(results: dict[str, Any], accumulate: int) -> None:
    for entrants in host_contestants().values():
        for name in (entrant.name for entrant in entrants):
            besides = sent(results, name, accumulate)["besides"]
            if name.startswith("TokenNorm"):
                assert besides["count"] == 1, name
                assert 0 < besides["bytes"] <= MAX_BYTES, name
            elif "by hand" in name:
                assert besides == {"count": 1, "bytes": 4}, name
            else:  # Lightning's broadcasts
                assert besides == {"count": accumulate, "bytes": 8 * accumulate}, name


@pytest.mark.parametrize("accumulate", QUICK.hosts_accumulates)
def test_gradients_of_each_host_against_float64(results: dict[str, Any], accumulate: int) -> None:
    found = rows(results, "hosts", accumulate=accumulate)
    everybody = [entrant.name for entrants in host_contestants().values() for entrant in entrants]
    assert [row["contestant"] for row in found] == everybody
    for row in found:
        error = row["gradient_error"]["relative_l2"]
        if row["contestant"] in (PLAIN, PLAIN_FSDP, PLAIN_FSDP2):
            assert error > 0.01, "the negative control"
        else:
            assert error < 2e-6, row["contestant"]
    assert [row["contestant"] for row in results["modes"]["hosts"]["memory"]] == everybody


def test_a_page_gets_the_tables_of_modes_that_have_a_place_in_it(folder: Path, results: dict[str, Any]) -> None:
    page = folder.parent / "page.md"
    text = page.read_text()
    start, end = marks("hosts")
    assert text.startswith(f"# A page\n\n{start}\n\n`python examples/benchmark.py --quick")
    assert text.endswith(f"![hosts](page/hosts.png)\n\n{end}\n\nThe end\n")
    assert "| target" in text
    assert "of an earlier run" not in text
    assert (folder.parent / "page" / "hosts.png").exists()
    assert fill(page, results, folder) == ["hosts"]
    assert page.read_text() == text
    assert all(mark in (REPOSITORY / "docs" / "benchmarks.md").read_text() for mark in (start, end))


def test_the_exchange(results: dict[str, Any]) -> None:
    result = results["modes"]["exchange"]
    assert [row["world_size"] for row in result["rows"]] == list(QUICK.exchange_ranks)
    assert all(row[kind]["median"] > 0 for row in result["rows"] for kind in ("latency_us", "send_us", "receive_us"))
    (sent,) = result["collectives"]
    assert (sent["op"], sent["count"]) == ("allgather", 1)
    assert 0 < sent["bytes"] <= MAX_BYTES
    assert list(result["model"]["predicted_us"]) == ["1000", "10000"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["latency"], "expected one of correctness, accumulation"),
        (["--rounds", "0"], "expected a whole number of at least 1"),
        (["--page", "no/such/page.md"], "expected a page that is there"),
        pytest.param(
            ["--preset", "gpu"],
            "there is no GPU here",
            marks=pytest.mark.skipif(torch.version.hip is not None, reason="hides CUDA's GPUs only"),
        ),
    ],
)
def test_bad_input(arguments: list[str], complaint: str) -> None:
    done = run_benchmark(*arguments, timeout_s=550)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
