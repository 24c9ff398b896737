"""One read's attempts: what is retried, how long, and which error ends it, with the test's own clock."""

import pickle

import google_crc32c
import pytest

from sa1b.storage.errors import (
    Counters,
    DamageError,
    DeniedError,
    ErrorClass,
    ExpiredError,
    Fault,
    MissingError,
    UnavailableError,
)
from sa1b.storage.retry import CounterSet, RetryPolicy, RetryState, random_fraction

GOOD = b"0123456789"
CRC = int(google_crc32c.value(GOOD))
RESET = Fault(ErrorClass.RESETS, "connection reset")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def state_of(clock: Clock, counters: CounterSet, *, deadline: float = 60.0, share: float = 1.0) -> RetryState:
    policy = RetryPolicy(deadline=deadline, clock=clock, random=lambda: share)
    return RetryState("s3://bucket/a.tar", 512, 10, CRC, policy, counters)


def run(state: RetryState, clock: Clock, fault: Fault, attempts: int) -> list[float]:
    """Fail that often, one second each; the waits."""
    waits = []
    for _ in range(attempts):
        state.start_attempt()
        clock.now += 1.0
        state.fail(fault)
        waits.append(state.backoff())
        clock.now += waits[-1]
    return waits


def test_waits_double_up_to_a_limit() -> None:
    clock = Clock()
    waits = run(state_of(clock, CounterSet(), deadline=1000), clock, RESET, 10)
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])


def test_a_wait_is_any_time_from_zero_to_its_limit() -> None:
    clock = Clock()
    assert run(state_of(clock, CounterSet(), share=0.0), clock, RESET, 5) == [0.0] * 5
    assert run(state_of(clock, CounterSet(), share=0.25), clock, RESET, 3) == pytest.approx(
        [0.025, 0.05, 0.1]
    )


def test_a_store_that_does_not_answer_is_reported_from_time_to_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sa1b.storage.retry._warned", [float("-inf")])
    clock = Clock()
    state = state_of(clock, CounterSet(), deadline=300)
    run(state, clock, RESET, 2)
    assert caplog.messages == []  # a short outage is nothing to report
    run(state, clock, RESET, 1)
    assert len(caplog.messages) == 1  # after three seconds
    caplog.clear()
    clock.now += 100_000
    state = state_of(clock, CounterSet(), deadline=300)
    run(state, clock, RESET, 14)
    assert len(caplog.messages) == 5  # in 97 seconds
    assert "s3://bucket/a.tar, bytes 512 to 522: connection reset; retrying for up to 2" in caplog.messages[0]


def test_reports_have_no_secret_of_a_url(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sa1b.storage.retry._warned", [float("-inf")])
    clock = Clock()
    state = state_of(clock, CounterSet(), deadline=300)
    state.url = "https://user:PASS@host/a.tar?X-Amz-Signature=SIGNED"
    run(state, clock, Fault(ErrorClass.RESETS, f"cannot connect to {state.url}"), 3)
    assert caplog.messages[0].startswith(
        "https://host/a.tar, bytes 512 to 522: cannot connect to https://host/a.tar;"
    )


def test_random_waits_come_from_the_system_not_from_a_state_that_a_fork_copies() -> None:
    assert len({random_fraction() for _ in range(100)}) == 100
    assert pickle.loads(pickle.dumps(RetryPolicy())) == RetryPolicy()


def test_the_deadline_ends_a_read_and_the_error_names_url_range_last_error_and_counters() -> None:
    clock, counters = Clock(), CounterSet()
    state = state_of(clock, counters)
    with pytest.raises(UnavailableError, match=r"s3://bucket/a.tar, bytes 512 to 522: unavailable") as caught:
        run(state, clock, RESET, 1000)
    assert clock.now == pytest.approx(161, abs=1.0)  # the last attempt begins at the deadline, not after it
    assert caught.value.last_error == "connection reset"
    assert caught.value.counters == counters.snapshot()
    assert caught.value.counters.resets == caught.value.counters.attempts > 10


def test_an_attempts_timeout_grows_with_its_length_and_ends_at_most_a_second_after_the_deadline() -> None:
    clock = Clock()
    policy = RetryPolicy(deadline=60, attempt_timeout=15, min_throughput=1000, clock=clock)
    state = RetryState("s3://bucket/a.tar", 0, 5000, None, policy, CounterSet())
    assert state.start_attempt() == 20
    clock.now += 57
    assert state.start_attempt() == pytest.approx(3)
    clock.now += 3
    assert state.start_attempt() == 1


def test_one_wrong_crc_is_retried() -> None:
    counters = CounterSet()
    state = state_of(Clock(), counters)
    state.start_attempt()
    assert not state.accept(b"0123456788")
    state.start_attempt()
    assert state.accept(GOOD)
    assert counters.snapshot() == Counters(reads=1, attempts=2, bytes=10, crc=1)


def test_the_same_wrong_crc_twice_is_damage_with_range_and_both_values() -> None:
    state = state_of(Clock(), CounterSet())
    bad = b"0123456788"
    state.start_attempt()
    assert not state.accept(bad)
    state.start_attempt()
    with pytest.raises(DamageError, match="s3://bucket/a.tar, bytes 512 to 522: crc32c") as caught:
        state.accept(bad)
    error = caught.value
    assert (error.url, error.start, error.length) == ("s3://bucket/a.tar", 512, 10)
    assert (error.expected, error.found) == (CRC, int(google_crc32c.value(bad)))


def test_a_body_of_another_length_is_short_whatever_its_crc() -> None:
    counters = CounterSet()
    state = state_of(Clock(), counters)
    state.start_attempt()
    assert not state.accept(GOOD[:5])
    assert (counters.snapshot().short, counters.snapshot().crc) == (1, 0)


def test_a_short_body_of_an_object_that_ends_there_is_damage() -> None:
    state = state_of(Clock(), CounterSet())
    state.check_end(522)
    with pytest.raises(DamageError, match="ends at byte 520"):
        state.check_end(520)


def test_missing_and_denied_end_at_once_and_denied_says_where_credentials_come_from() -> None:
    with pytest.raises(MissingError, match=r"no such object \(NoSuchKey\); check the URL"):
        state_of(Clock(), CounterSet()).fail(Fault(ErrorClass.MISSING, "NoSuchKey"))
    with pytest.raises(DeniedError, match="AWS_ACCESS_KEY_ID.*~/.aws/credentials"):
        state_of(Clock(), CounterSet()).fail(Fault(ErrorClass.DENIED, "AccessDenied"))


def test_expired_credentials_are_looked_up_once_more() -> None:
    state = state_of(Clock(), CounterSet())
    state.fail(Fault(ErrorClass.EXPIRED, "ExpiredToken"))
    with pytest.raises(ExpiredError, match="expired"):
        state.fail(Fault(ErrorClass.EXPIRED, "ExpiredToken"))


def test_attempts_that_take_long_are_counted_slow() -> None:
    clock, counters = Clock(), CounterSet()
    state = state_of(clock, counters)
    state.start_attempt()
    clock.now += 6
    assert state.accept(GOOD)
    assert counters.snapshot().slow == 1


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


def test_an_attempt_without_a_response_is_reported_three_seconds_after_the_read_began() -> None:
    clock = Clock()
    state = state_of(clock, CounterSet())
    times = []
    for seconds in (0.0, 2.0, 2.0):
        clock.now += seconds
        times.append(round(state.silent_time(15), 3))
    assert times == [3.0, 1.0, 3.0]
    assert state.silent_time(0.5) == 0.5
    state.length = 4 << 20
    assert round(state.silent_time(60)) == 3 + 16
