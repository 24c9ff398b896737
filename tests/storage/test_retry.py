"""One read's attempts: what is repeated, how long, and which error ends it. No clock but the test's own."""

import pickle

import google_crc32c
import pytest

from sa1b.storage.classify import Cause, Fault
from sa1b.storage.counters import Counters, Tally
from sa1b.storage.errors import DamageError, DeniedError, ExpiredError, MissingError, UnavailableError
from sa1b.storage.retry import Effort, Patience, draw

GOOD = b"0123456789"
CRC = int(google_crc32c.value(GOOD))
RESET = Fault(Cause.RESETS, "connection reset")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def effort(clock: Clock, tally: Tally, *, deadline: float = 60.0, share: float = 1.0) -> Effort:
    patience = Patience(deadline=deadline, clock=clock, draw=lambda: share)
    return Effort("s3://bucket/a.tar", 512, 10, CRC, patience, tally)


def run(one: Effort, clock: Clock, fault: Fault, attempts: int) -> list[float]:
    """Fail that often, one second each; the waits."""
    waits = []
    for _ in range(attempts):
        one.begin()
        clock.now += 1.0
        one.failed(fault)
        waits.append(one.wait())
        clock.now += waits[-1]
    return waits


def test_waits_double_up_to_a_limit() -> None:
    clock = Clock()
    waits = run(effort(clock, Tally(), deadline=1000), clock, RESET, 10)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])


def test_a_wait_is_any_time_from_zero_to_its_limit() -> None:
    clock = Clock()
    assert run(effort(clock, Tally(), share=0.0), clock, RESET, 5) == [0.0] * 5
    assert run(effort(clock, Tally(), share=0.25), clock, RESET, 3) == pytest.approx([0.025, 0.05, 0.1])


def test_random_waits_come_from_the_system_not_from_a_state_that_a_fork_copies() -> None:
    assert len({draw() for _ in range(100)}) == 100
    assert pickle.loads(pickle.dumps(Patience())) == Patience()


def test_the_deadline_ends_a_read_and_the_error_names_url_range_cause_and_counters() -> None:
    clock, tally = Clock(), Tally()
    one = effort(clock, tally)
    with pytest.raises(UnavailableError, match=r"s3://bucket/a.tar, bytes 512 to 522: unavailable") as caught:
        run(one, clock, RESET, 1000)
    assert clock.now == pytest.approx(161, abs=1.0)  # the last attempt begins at the deadline, not after it
    assert caught.value.cause == "connection reset"
    assert caught.value.counters == tally.snapshot()
    assert caught.value.counters.resets == caught.value.counters.attempts > 10


def test_an_attempt_gets_its_time_and_time_for_its_length_but_at_most_a_second_beyond_the_deadline() -> None:
    clock = Clock()
    patience = Patience(deadline=60, attempt=15, slowest=1000, clock=clock)
    one = Effort("s3://bucket/a.tar", 0, 5000, None, patience, Tally())
    assert one.begin() == 20
    clock.now += 57
    assert one.begin() == pytest.approx(3)
    clock.now += 3
    assert one.begin() == 1


def test_one_wrong_crc_is_repeated() -> None:
    tally = Tally()
    one = effort(Clock(), tally)
    one.begin()
    assert not one.accept(b"0123456788")
    one.begin()
    assert one.accept(GOOD)
    assert tally.snapshot() == Counters(reads=1, attempts=2, bytes=10, crc=1)


def test_the_same_wrong_crc_twice_is_damage_with_place_and_both_values() -> None:
    one = effort(Clock(), Tally())
    bad = b"0123456788"
    one.begin()
    assert not one.accept(bad)
    one.begin()
    with pytest.raises(DamageError, match="s3://bucket/a.tar, bytes 512 to 522: crc32c") as caught:
        one.accept(bad)
    error = caught.value
    assert (error.url, error.start, error.length) == ("s3://bucket/a.tar", 512, 10)
    assert (error.expected, error.found) == (CRC, int(google_crc32c.value(bad)))


def test_different_wrong_bytes_every_time_are_the_wires_fault_not_damage() -> None:
    clock = Clock()
    one = effort(clock, Tally())

    def read() -> None:
        for attempt in range(10**6):
            one.begin()
            assert not one.accept(attempt.to_bytes(10, "big"))
            clock.now += 1 + one.wait()

    with pytest.raises(UnavailableError, match="crc32c"):
        read()


def test_a_body_of_another_length_is_short_whatever_its_crc() -> None:
    tally = Tally()
    one = effort(Clock(), tally)
    one.begin()
    assert not one.accept(GOOD[:5])
    assert (tally.snapshot().short, tally.snapshot().crc) == (1, 0)


def test_a_short_body_of_an_object_that_ends_there_is_damage() -> None:
    one = effort(Clock(), Tally())
    one.sized(522)
    with pytest.raises(DamageError, match="ends at byte 520"):
        one.sized(520)


def test_missing_and_denied_end_at_once_and_denied_says_where_credentials_come_from() -> None:
    with pytest.raises(MissingError, match="no such object"):
        effort(Clock(), Tally()).failed(Fault(Cause.MISSING, "NoSuchKey"))
    with pytest.raises(DeniedError, match="AWS_ACCESS_KEY_ID.*~/.aws/credentials"):
        effort(Clock(), Tally()).failed(Fault(Cause.DENIED, "AccessDenied"))


def test_expired_credentials_get_one_more_look() -> None:
    one = effort(Clock(), Tally())
    one.failed(Fault(Cause.EXPIRED, "ExpiredToken"))
    with pytest.raises(ExpiredError, match="expired"):
        one.failed(Fault(Cause.EXPIRED, "ExpiredToken"))


def test_attempts_that_take_long_are_counted_slow() -> None:
    clock, tally = Clock(), Tally()
    one = effort(clock, tally)
    one.begin()
    clock.now += 6
    assert one.accept(GOOD)
    assert tally.snapshot().slow == 1


def test_counters_print_what_is_not_zero_and_sum_up_faults() -> None:
    assert str(Counters(reads=3, bytes=4_000_000, resets=2, waited=1.5)) == (
        "reads 3, bytes 4,000,000, resets 2, waited 1.5"
    )
    assert str(Counters()) == "nothing read"
    assert Counters(resets=1, crc=2, throttled=3, waited=9).faults == 6


@pytest.mark.parametrize("kind", [MissingError, DeniedError, ExpiredError, DamageError, UnavailableError])
def test_errors_survive_pickle_and_can_be_made_from_a_message(kind: type[MissingError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what happened", url="s3://b/a", start=3, length=4)))
    assert type(error) is kind
    assert (str(error), error.url, error.start, error.length) == ("what happened", "s3://b/a", 3, 4)
    assert str(kind("only this")) == "only this"
