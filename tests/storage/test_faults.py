"""Reads through a proxy that breaks requests: the bytes are those of the clean run, and the counters show it."""

import asyncio
import http.client
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sa1b.storage import http_range
from sa1b.storage.errors import Counters, ReplacedError, UnavailableError
from sa1b.storage.reader import Range, Reader
from sa1b.storage.retry import RetryPolicy
from tests.storage.conftest import HASTY, UNHURRIED, Store, WaitedTime
from tests.storage.fault_proxy import KINDS
from tests.storage.service import Service

RARE = [pytest.param(rate, marks=pytest.mark.slow) for rate in (0.01, 0.05)]
# What a broken request is counted as. A connection that is reset before its answer may be opened again by
# the HTTP client itself, so of those not every one is seen.
COUNTED = {
    "stall": "timeouts",
    "stall_body": "timeouts",
    "busy": "throttled",
    "short": "short",
    "flip": "crc",
    "reset_body": "resets",
}


def through(
    store: Store, seed: int, rate: float, ranges: list[Range], *kinds: str
) -> tuple[list[bytes], Counters, list[list[Any]]]:
    """Read ranges through a proxy; the bytes, the counters, and the log of faults."""
    stalls = rate and any(kind.startswith("stall") for kind in kinds or KINDS)
    with (
        Service("fault_proxy", store.port, seed, rate, *kinds) as proxy,
        Reader(
            "s3://data", options=store.signed(proxy.port), retry_policy=HASTY if stalls else UNHURRIED
        ) as reader,
    ):
        data = list(reader.read_ranges(ranges, prefetch=200))
        return data, reader.counters(), proxy.ask({"do": "log"})["faults"]


@pytest.mark.parametrize("rate", [0.0, *RARE, 0.2])
def test_bytes_and_sequence_are_those_of_the_clean_run(store: Store, rate: float) -> None:
    count = 600 if rate == 0.01 else 300
    ranges = store.ranges(count, seed=int(1000 * rate))
    data, counters, faults = through(store, 7, rate, ranges)
    assert data == store.slices(ranges)
    fired = Counter(COUNTED[kind] for _, _, _, kind in faults if kind in COUNTED)
    given_up = counters.timeouts - fired["timeouts"]  # answers that a busy machine gave too late to be seen
    assert given_up >= 0
    for name, seen in fired.items():
        assert getattr(counters, name) >= seen - given_up, (name, faults)
    assert counters.reads == count
    assert (len(faults) > 0) == (rate > 0)
    if not rate:
        assert counters.faults == 0


def test_refused_signatures_among_other_faults_change_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = store.ranges(300, seed=12)
    kinds = [kind for kind in KINDS if not kind.startswith("stall")]
    with (
        Service("fault_proxy", store.port, 15, 0.1, *kinds) as proxy,
        Reader("s3://data", options=store.signed(proxy.port), retry_policy=UNHURRIED) as reader,
    ):
        data = []
        for number, read in enumerate(reader.read_ranges(ranges)):
            data.append(read)
            if number in (60, 180):
                # Otherwise a signature of the same second is the same.
                monkeypatch.setattr(http_range, "LIFETIME", 1000 + number)
                store.service.ask({"do": "revoke"})
        assert data == store.slices(ranges)
        assert len(proxy.ask({"do": "log"})["faults"]) > 15
        assert reader.counters().expired > 1
    store.service.ask({"do": "accept"})  # another test may sign the same in this second


def test_an_object_replaced_among_other_faults_is_never_mixed(tmp_path: Path) -> None:
    path = tmp_path / "data" / "a.bin"
    path.parent.mkdir()
    path.write_bytes(b"a" * 1_000_000)
    ranges = [Range("a.bin", 2000 * i, 2000) for i in range(500)]
    with (
        Service("range_server", tmp_path) as server,
        Service("fault_proxy", server.port, 16, 0.1, "reset", "reset_body", "busy", "short") as proxy,
        Reader(
            "s3://data",
            options={"key": "KEY", "secret": "secret", "endpoint_url": proxy.url},
            retry_policy=UNHURRIED,
        ) as reader,
    ):
        reads = reader.read_ranges(ranges)
        found = [next(reads) for _ in range(100)]
        path.with_name("new").write_bytes(b"b" * 1_000_000)
        path.with_name("new").replace(path)
        with pytest.raises(ReplacedError, match="s3://data/a.bin: replaced since its first read"):
            found.extend(reads)
        assert reader.counters().faults > 3
    assert set(found) == {b"a" * 2000}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("stall")])
def test_each_fault_alone_at_a_half_of_all_requests(store: Store, kind: str) -> None:
    ranges = store.ranges(24, seed=3)
    data, counters, faults = through(store, 11, 0.5, ranges, kind)
    assert data == store.slices(ranges)
    assert len(faults) > 6
    assert {entry[3] for entry in faults} == {kind}
    if kind in COUNTED:
        assert getattr(counters, COUNTED[kind]) >= len(faults)
        assert counters.faults == getattr(counters, COUNTED[kind])


def test_without_a_crc_faults_other_than_flipped_bits_cannot_pass_either(store: Store) -> None:
    ranges = [Range(item.name, item.start, item.length) for item in store.ranges(60)]
    data, _, faults = through(store, 13, 0.4, ranges, *(set(KINDS) - {"flip", "stall", "stall_body"}))
    assert data == store.slices(ranges)
    assert faults


def test_small_objects_without_a_crc_are_right_though_bits_flip(store: Store) -> None:
    for seed in range(3):
        with (
            Service("fault_proxy", store.port, seed, 0.4, "flip") as proxy,
            Reader("s3://data", options=store.options(proxy.port), retry_policy=HASTY) as reader,
        ):
            assert reader.read_whole("deep/b c+ü.bin", 10**6) == store.bytes("deep/b c+ü.bin")


def test_a_seed_replayed_gives_the_same_faults(store: Store) -> None:
    ranges = store.ranges(60, seed=4)
    kinds = [
        kind for kind in KINDS if kind not in ("reset", "stall", "stall_body")
    ]  # see COUNTED: an attempt more or less
    first, second, other = (through(store, seed, 0.2, ranges, *kinds)[2] for seed in (5, 5, 6))
    assert first == second != other
    assert len(first) > 10


def outage(store: Store, seconds: float, policy: RetryPolicy) -> Counters:
    """Read on while every connection is refused for a time; the counters."""
    ranges = store.ranges(400, seed=8)
    with (
        Service("fault_proxy", store.port, 1, 0.0) as proxy,
        Reader("s3://data", options=store.options(proxy.port), retry_policy=policy) as reader,
    ):
        data = []
        for number, read in enumerate(reader.read_ranges(ranges)):
            data.append(read)
            if number == 100:
                proxy.ask({"do": "outage", "seconds": seconds})
        assert data == store.slices(ranges)
        assert proxy.ask({"do": "log"})["outage_hits"] > 0
        return reader.counters()


def test_an_outage_is_waited_out(store: Store) -> None:
    assert outage(store, 0.5, HASTY).resets > 0


@pytest.mark.slow
def test_an_outage_of_a_minute_is_waited_out(store: Store) -> None:
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(seconds)

    began = time.monotonic()
    counters = outage(store, 60, RetryPolicy(async_sleep=sleep))
    print(f"\noutage of 60 s: {time.monotonic() - began:.1f} s for all, {counters}")
    assert 0 < max(waits) <= 10  # after the outage no read waits longer


def test_an_outage_longer_than_the_deadline_names_url_and_last_error(
    store: Store, waited: WaitedTime
) -> None:
    with (
        Service("fault_proxy", store.port, 1, 0.0) as proxy,
        Reader("s3://data", options=store.options(proxy.port), retry_policy=waited.policy(20)) as reader,
    ):
        reader.read_range("a.bin", 0, 10)
        proxy.ask({"do": "outage", "seconds": 600})
        with pytest.raises(UnavailableError, match="s3://data/a.bin, bytes 5 to 15: unavailable") as caught:
            reader.read_range("a.bin", 5, 10)
    assert caught.value.last_error
    assert caught.value.counters.resets > 3


def test_a_storm_of_503_ends_at_the_deadline_not_before(store: Store, waited: WaitedTime) -> None:
    with (
        Service("fault_proxy", store.port, 1, 1.0, "busy") as proxy,
        Reader("s3://data", options=store.options(proxy.port), retry_policy=waited.policy(20)) as reader,
    ):
        with pytest.raises(UnavailableError, match="SlowDown"):
            reader.read_range("a.bin", 5, 10)
        assert waited.now == pytest.approx(20)
        assert reader.counters().throttled == reader.counters().attempts > 3


def test_a_stall_costs_one_attempt_not_the_deadline(store: Store) -> None:
    ranges = store.ranges(8, seed=21)
    # Each read's deadline is 60 s: one that a stall had cost would be an error.
    data, counters, faults = through(store, 2, 0.5, ranges, "stall", "stall_body")
    assert data == store.slices(ranges)
    # A busy machine may give up attempts that do not stall; nothing else is retried.
    assert counters.attempts - counters.reads == counters.faults == counters.timeouts >= len(faults) > 0


def test_closing_ends_reads_that_hang(store: Store) -> None:
    with (
        Service("fault_proxy", store.port, 1, 1.0, "stall") as proxy,
        Reader("s3://data", options=store.options(proxy.port), attempt_timeout=3600, deadline=3600) as reader,
    ):
        ended: list[BaseException] = []

        def read() -> None:
            try:
                reader.read_range("a.bin", 0, 10)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        while not proxy.ask({"do": "log"})["faults"]:
            time.sleep(0.05)
        reader.close()
        thread.join(60)
        assert len(ended) == 1


def test_the_proxy_answers_expect_100_continue(store: Store, tmp_path: Path) -> None:
    with Service("fault_proxy", store.port, 1, 0.0) as proxy:
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
        connection.putrequest("PUT", "/data/put/new.bin")
        connection.putheader("Content-Length", "5")
        connection.putheader("Expect", "100-continue")
        connection.endheaders()
        assert connection.sock.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.send(b"bytes")
        assert connection.getresponse().status == 200
        connection.close()
    assert store.bytes("put/new.bin") == b"bytes"
