"""What the papers' experiments compute besides running models."""

from __future__ import annotations

import torch

import pliant
from bench.finetune import LONGEST, SHORTEST, Trainer, bucket, lengths
from bench.papers import Run, bladedisc
from bench.papers.relax import PAGE, pooled


def test_pool_takes_again_what_has_the_same_size() -> None:
    one, two = (PAGE, 0, 1), (PAGE, 2, 3)
    assert pooled([[one, two]]) == PAGE  # the second takes the first's block
    assert pooled([[one, (PAGE, 1, 2)]]) == 2 * PAGE  # both are alive in step 1
    assert pooled([[one], [one]]) == PAGE


def test_pool_keeps_what_no_other_shape_can_use() -> None:
    assert pooled([[(PAGE, 0, 1)], [(2 * PAGE, 0, 1)]]) == 3 * PAGE
    assert pooled([[(2 * PAGE, 0, 1)], [(PAGE, 0, 1)]]) == 3 * PAGE
    assert pooled([[(1, 0, 1)], [(PAGE, 0, 1)]]) == PAGE  # sizes are whole pages
    assert pooled([[(0, 0, 1)]]) == 0


def test_lengths_cover_the_range() -> None:
    drawn = lengths(15, 0)
    assert drawn == lengths(15, 0) and drawn != lengths(15, 1)
    part = (LONGEST - SHORTEST) / 15
    places = sorted(int((length - SHORTEST) / part) for length in drawn)
    assert all(abs(place - k) <= 1 for k, place in enumerate(places))
    assert [bucket(n) for n in (100, 128, 129, 2048, 2049)] == [
        *(128, 128, 256, 2048, LONGEST)
    ]


def test_times_are_compared_where_both_ran() -> None:
    ours = [{"length": 10, "seconds": 1.0}, {"length": 20, "seconds": 2.0}]
    theirs = [{"length": 10, "seconds": 3.0}, {"length": 20, "least": 10**9}]
    steps = {"pliant": ours, "remat off": theirs}
    assert bladedisc.over_ours("remat off", steps) == "3.00 (3.00 to 3.00)"
    told = {"compiles": 1, "compile_seconds": 1.0, "loss": 2.5}
    steps = {way: [{**s, **told} for s in found] for way, found in steps.items()}
    line = bladedisc.way_line("remat off", steps, {"least": 10**9})
    assert line[:2] == ("remat off", "3") and line[3] == "1 of 2"
    assert "refused" in line


def test_a_plan_has_the_limit_of_its_job() -> None:
    """A step that ran inside a limit is planned without one if the job has none."""
    net, ids = torch.nn.Linear(4, 4), torch.ones(2, 4)
    step = pliant.compile_training(
        net, torch.nn.functional.mse_loss, pliant.SGD(lr=0.1), ((ids,), (ids,))
    )
    step.memory_limit = 16
    trainer = Trainer.__new__(Trainer)
    trainer.compiled = {0: step}
    for limit, told in ((None, "peak"), (16, "least"), (1 << 20, "peak")):
        trainer.limit = limit
        assert list(trainer.planned(ids, exact=False)) == [told]


def test_a_shorter_experiment_takes_some_of_the_sizes() -> None:
    whole, short = (Run(2, share) for share in (1.0, 0.1))
    every = range(1, 129)
    assert whole.rounds == 15 and short.rounds == 2
    assert short.some(every, 33)[-1] == 128 and len(whole.some(every, 33)) == 33
