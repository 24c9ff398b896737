"""The case matrix: batches of weak and strong scaling, modes that need more ranks, sizes that do not fit."""

import pytest

from sa1b.errors import UsageError
from sa1b.programs.scaling.cases import MODES, cases_of, modes_for, series


def test_a_micro_batch_for_each_rank_or_a_fixed_global_batch() -> None:
    weak, strong = series((1, 2, 4), ("ddp",), ("fp32",), micro_batch=3, global_batch=12)
    assert [(one.ranks, one.images, one.global_batch) for one in weak.cases] == [
        (1, 3, 3),
        (2, 3, 6),
        (4, 3, 12),
    ]
    assert [(one.ranks, one.images, one.global_batch) for one in strong.cases] == [
        (1, 12, 12),
        (2, 6, 12),
        (4, 3, 12),
    ]
    cases = cases_of([weak, strong])
    assert len(cases) == 5  # both series have the case of four ranks
    assert [one.ranks for one in cases] == [1, 1, 2, 2, 4]


def test_every_mode_and_precision_has_a_series_of_each_kind() -> None:
    found = series((1, 4), tuple(MODES)[:4], ("fp32", "bf16"), micro_batch=1, global_batch=4)
    assert len(found) == 2 * 4 * 2
    assert len({(one.kind, one.mode, one.precision) for one in found}) == 16


def test_hybrid_sharding_has_two_copies_of_the_model_and_is_compared_with_one_rank_without_copies() -> None:
    weak, _ = series((1, 2, 3, 4, 6), ("fsdp-hybrid",), ("fp32",), micro_batch=1, global_batch=12)
    assert [(one.ranks, one.mode) for one in weak.cases] == [
        (1, "fsdp-full"),
        (4, "fsdp-hybrid"),
        (6, "fsdp-hybrid"),
    ]
    assert [one.parallel("cpu", 60).replicas for one in weak.cases] == [1, 2, 2]
    assert modes_for((1, 2, 3)) == tuple(MODES)[:3]
    assert modes_for((1, 4)) == tuple(MODES)[:4]


def test_settings_of_training_for_each_mode() -> None:
    settings = [
        one.cases[-1].parallel("cpu", 60)
        for one in series((4,), MODES, ("bf16",), micro_batch=1, global_batch=4)
    ]
    assert [(one.mode, one.shard, one.replicas, one.precision) for one in settings[:4]] == [
        ("ddp", "full", 1, "bf16"),
        ("fsdp", "full", 1, "bf16"),
        ("fsdp", "grad_op", 1, "bf16"),
        ("fsdp", "full", 2, "bf16"),
    ]


@pytest.mark.parametrize(
    ("ranks", "modes", "message"),
    [
        ((1, 3), ("ddp",), "--global-batch 8: must be a multiple of 6 images, .* of 3 ranks"),
        ((1, 2), ("fsdp-hybrid",), "--modes fsdp-hybrid: needs an even number of ranks, at least 4"),
    ],
)
def test_batches_and_modes_that_do_not_fit_the_ranks_are_refused(ranks, modes, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=message):
        series(ranks, modes, ("fp32",), micro_batch=2, global_batch=8)
