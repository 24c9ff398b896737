"""The report of a stall: which rank the others wait for, what it does, and a table of all ranks; NCCL's RAS."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sa1b.engine.watch.watchdog.rank_states import Observed, RankState, culprits, nccl_status, table, verdict


def rank(own: int, /, *, age: float = 0.5, silent: bool = False, **changes: Any) -> Observed:
    state = RankState(
        rank=own, host=f"node{own // 2}", beat=9, phase="compute", step=11, micro_batch=2, number=400,
        seconds=30.0, collectives=81, code="autograd/graph.py:979 backward", reading="", ended="",
    )  # fmt: skip
    return Observed(state._replace(**changes), age, silent)


def names(ranks: list[Observed]) -> list[int]:
    return [one.state.rank for one in culprits(ranks)]


def test_the_others_wait_for_the_rank_that_began_the_fewest_phases() -> None:
    reading = "image 5 in s3://b/sa1b-000020-0000.tar at offset 512"
    late = rank(1, phase="data", number=397, reading=reading, code="python3.11/threading.py:331 wait")
    assert names([rank(0), late, rank(2)]) == [1]
    assert verdict([rank(0), late, rank(2)]) == (
        "rank 1 (host node0) is in step 12, data, micro-batch 2, for 30 s, at python3.11/threading.py:331 wait; "
        f"it waits for {reading}, and the others wait for it"
    )


def test_in_the_same_phase_they_wait_for_the_rank_that_started_the_fewest_collectives() -> None:
    assert names([rank(0), rank(1), rank(2, collectives=80)]) == [2]
    assert names([rank(0), rank(1, number=399), rank(2, collectives=80)]) == [1]


def test_a_rank_that_does_not_answer_comes_before_one_that_is_behind() -> None:
    ranks = [rank(0), rank(1, number=390), rank(2, silent=True, age=25.0, number=400)]
    assert names(ranks) == [2]
    assert verdict(ranks) == (
        "rank 2 (host node1) does not answer: it is stopped or dead, or its host is lost; last seen at least 25 s "
        "ago in step 12, compute, micro-batch 2"
    )


def test_a_rank_that_failed_is_named_before_all_others() -> None:
    ranks = [
        rank(0, ended="lost"),
        rank(1, ended="failed", phase="update", micro_batch=0),
        rank(2, silent=True),
    ]
    assert verdict(ranks) == "rank 1 (host node0) failed in step 12, update; see its message"
    lost = [rank(0, ended="lost"), rank(1), rank(2, ended="lost", number=100)]
    assert names(lost) == [1]  # the others have ended, and because of it


def test_ranks_in_one_collective_point_to_the_network() -> None:
    ranks = [rank(0), rank(1), rank(2)]
    assert "all 3 ranks are in the same collective operation" in verdict(ranks)
    assert "the network between their hosts" in verdict(ranks)


def test_ranks_that_wait_for_data_do_not_point_to_the_network() -> None:
    where = "image 5 in /data/sa1b-000020-0000.tar at offset 512"
    waits = {"reading": where, "code": "python3.11/threading.py:331 wait"}
    for changes in (
        {"phase": "data", **waits},
        {"phase": "evaluation", **waits},
        {"phase": "resume", "code": "storage/local.py:51 read"},
        {"phase": "start", "code": "sa1b/limit.py:46 call"},
    ):
        lines = verdict([rank(0, **changes), rank(1, **changes)]).splitlines()
        assert lines[0].startswith(
            "all 2 ranks wait for data, and none for another rank: the storage that they"
        )
        assert lines[2].startswith(
            f"rank 1 (host node0) is in step 12, {changes['phase']}, micro-batch 2, for 30 s"
        )
        assert ("it waits for" in lines[2]) == ("reading" in changes)
    mixed = [rank(0, phase="evaluation", **waits), rank(1, phase="evaluation")]
    assert "the same collective operation" in verdict(mixed)


def test_a_single_process_has_nobody_who_waits() -> None:
    assert verdict([rank(0, phase="other", micro_batch=0)]) == (
        "rank 0 (host node0) is in step 12, other, for 30 s, at autograd/graph.py:979 backward"
    )


def test_the_table_marks_the_rank_that_is_behind() -> None:
    shown = table([rank(0), rank(1, silent=True, age=20.0), rank(2)]).splitlines()
    assert shown[0].split() == [
        "rank", "host", "step", "phase", "micro-batch", "for", "collectives", "main", "thread",
    ]  # fmt: skip
    assert shown[2].split() == [
        ">",
        *["1", "node0", "12", "compute", "2", "50", "s", "81", "does", "not", "answer"],
    ]
    assert [line[0] for line in shown[1:]] == [" ", ">", " "]


def test_of_many_ranks_those_in_the_same_code_share_a_row() -> None:
    ranks = [rank(number) for number in range(1000)]
    ranks[7] = rank(7, phase="data", number=399)
    shown = table(ranks).splitlines()
    assert len(shown) == 3
    assert shown[1].split()[:4] == [">", "7", "node3", "12"]
    assert "0-6, 8-999" in shown[2]
    assert "500 hosts" in shown[2]
    stopped = [rank(number, silent=number >= 100) for number in range(1000)]
    assert verdict(stopped).splitlines()[-1] == "884 more ranks are in the same state"


STATUS = b"NCCL version 2.30.3\nJob summary\n  2 nodes 16 processes\n  rank 3: NOCOMM\n"


@pytest.fixture
def serve() -> Iterator[Callable[[dict[bytes, bytes]], str]]:
    """A function that starts a server of answers by request and returns its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def start(answers: dict[bytes, bytes]) -> str:
            threading.Thread(target=run, args=(answers,), daemon=True).start()
            return f"127.0.0.1:{listener.getsockname()[1]}"

        def run(answers: dict[bytes, bytes]) -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    if line not in answers:
                        return
                    connection.sendall(answers[line])
                    if line == b"VERBOSE STATUS\n":
                        return

        yield start


HANDSHAKE = {b"CLIENT PROTOCOL 2\n": b"SERVER PROTOCOL 2\n", b"TIMEOUT 5\n": b"OK\n"}


def test_the_status_is_the_text_after_the_handshake(serve: Callable[[dict[bytes, bytes]], str]) -> None:
    address = serve({**HANDSHAKE, b"VERBOSE STATUS\n": STATUS})
    assert nccl_status({"NCCL_RAS_ADDR": address}) == STATUS.decode()


def test_a_server_that_ends_the_connection_is_an_error(serve: Callable[[dict[bytes, bytes]], str]) -> None:
    address = serve({b"CLIENT PROTOCOL 2\n": b"SERVER PROTOCOL 2\n"})
    with pytest.raises(ConnectionResetError, match="TIMEOUT 5"):
        nccl_status({"NCCL_RAS_ADDR": address})


def test_nothing_at_the_address_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        nccl_status({"NCCL_RAS_ADDR": f"127.0.0.1:{port}"})
