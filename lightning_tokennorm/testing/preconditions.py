"""What a proof relies on: tokens to train on, the same weights and the same loss each time, samples kept apart."""

from __future__ import annotations

from dataclasses import replace

from lightning_tokennorm.counting import SupervisedTokens
from lightning_tokennorm.testing.fits import Case, build_twice, fit_twice, look_at_labels, run, take_counter
from lightning_tokennorm.testing.module import listed
from lightning_tokennorm.testing.watch import Facts


def check_preconditions(case: Case, allow_batch_dependent: bool) -> tuple[Case, Facts, list[str]]:
    """Look at what a proof relies on.

    Args:
        case: The case.
        allow_batch_dependent: Whether layers may mix the samples of a batch.

    Returns:
        The case with the counter that fits the module, what the module is like, and notes for the report.

    Raises:
        ValueError: The proof cannot be made.
        RankError: The module cannot be fitted in one process.
    """
    if isinstance(case.counter, SupervisedTokens) and case.counter.shift == "auto":
        case = replace(case, counter=run(take_counter, 1, case, facts=None)[0])
    without_tokens, shift_shows = run(look_at_labels, 1, case, facts=None)[0]
    if without_tokens:
        raise ValueError(without_tokens)
    if differ := run(build_twice, 1, case, facts=None)[0]:
        raise ValueError(
            f"`make_module()` does not give the same weights each time: {listed(differ)} differ, although"
            " torch's seed was the same. Load them, or draw them from torch's generator."
        )
    facts, losses = run(fit_twice, 1, case, facts=None)[0]
    notes = ["plain SGD takes the place of the module's optimizer", *case.host.notes]
    if facts.layers_with_dropout:
        layers = "1 layer" if facts.layers_with_dropout == 1 else f"{facts.layers_with_dropout} layers"
        notes.append(f"dropout is switched off in {layers} for the run")
    if not shift_shows:
        notes.append("no sample has a live first label, so a `shift` that does not fit the model would not show")
    if facts.not_optimised:
        notes.append(f"not compared, since no optimizer holds them: {listed(facts.not_optimised)}")
    if facts.batch_dependent:
        mixing = ", ".join(facts.batch_dependent)
        if not allow_batch_dependent:
            raise ValueError(
                f"These layers mix the samples of a batch, so no split leaves them alike: {mixing}. Put them into eval"
                " mode in `make_module`, replace them, or pass `allow_batch_dependent=True` and wide tolerances."
            )
        notes.append(f"layers that mix the samples of a batch are allowed: {mixing}")
    if losses[0] != losses[1] and losses[0] == losses[0]:
        raise ValueError(
            f"The loss is not deterministic: the same samples and weights gave {losses[0]!r} and {losses[1]!r}. Switch"
            " the randomness of the module off in `make_module`, and that of `collate_fn`."
        )
    return case, facts, notes
