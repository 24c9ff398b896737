"""The CPUs of ranks: disjoint, on different cores as far as possible; numbers of ranks that do not fit."""

from pathlib import Path

import pytest

from sa1b.errors import UsageError
from sa1b.programs.scaling.cases import Machine

PLAIN = Machine("cpu", 0, 4, (0, 1, 2, 3))


@pytest.fixture
def siblings(tmp_path: Path) -> Path:
    """A machine of four cores whose CPUs n and n + 4 are threads of the same core."""
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def test_ranks_have_disjoint_cpus_and_as_many_threads_alone_as_together() -> None:
    placed = PLAIN.placement(2, None)
    assert (placed.threads, placed.cpus) == (2, ((0, 1), (2, 3)))
    assert str(placed) == "2 threads a rank, bound to CPUs: rank 0 on 0+1, rank 1 on 2+3"


def test_two_threads_of_a_core_are_used_only_if_there_are_too_few_cores(siblings: Path) -> None:
    machine = Machine("cpu", 0, 8, tuple(range(8)))
    placed = machine.placement(4, 1, siblings)
    assert placed.cpus == ((0,), (1,), (2,), (3,))
    assert not placed.shared_cores
    placed = machine.placement(4, 2, siblings)
    assert placed.shared_cores
    assert sorted(cpu for cpus in placed.cpus for cpu in cpus) == list(range(8))
    assert "threads of the same core" in str(placed)


def test_cpus_outside_the_affinity_mask_are_not_used(siblings: Path) -> None:
    placed = Machine("cpu", 0, 2, (1, 5)).placement(2, 1, siblings)
    assert placed.cpus == ((1,), (5,))
    assert placed.shared_cores


def test_ranks_on_gpus_are_not_bound() -> None:
    machine = Machine("cuda", 8, 64, tuple(range(64)))
    assert machine.placement(8, None).cpus == ()
    assert machine.ranks(None, None) == (1, 2, 4, 8)


def test_numbers_of_ranks_by_default_double_up_to_the_machine() -> None:
    assert PLAIN.ranks(None, None) == (1, 2, 4)
    assert PLAIN.ranks(None, 2) == (1, 2)
    assert Machine("cpu", 0, 6, ()).ranks(None, None) == (1, 2, 4, 6)
    assert Machine("cpu", 0, 1, ()).ranks(None, None) == (1,)


@pytest.mark.parametrize(
    ("machine", "given", "threads", "message"),
    [
        (PLAIN, (1, 8), None, "--ranks 8: this job may use 4 CPUs for --threads 1; pass at most 4"),
        (PLAIN, (4,), 2, "--ranks 4: this job may use 4 CPUs for --threads 2; pass at most 2"),
        (PLAIN, None, 5, "--threads 5: this job may use 4 CPUs"),
        (Machine("cuda", 2, 64, ()), (4,), None, "--ranks 4: this job may use 2 GPUs; pass at most 2"),
    ],
)
def test_more_ranks_than_cpus_or_gpus_are_refused(
    machine: Machine, given: tuple[int, ...] | None, threads: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        machine.ranks(given, threads)


def test_a_rank_of_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="starts its ranks itself"):
        Machine.of_this_process("cpu")
