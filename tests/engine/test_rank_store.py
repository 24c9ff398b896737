"""The ranks' store: what is said if something else is at MASTER_ADDR and MASTER_PORT, and that no wait lasts."""

import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest

from sa1b.engine.ranks import process_group as rank_store
from sa1b.engine.ranks.process_group import fresh_store
from sa1b.errors import UsageError

WAIT = timedelta(seconds=1)
SILENT = "accepts connections and does not answer"


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a program that accepts connections and never answers, in MASTER_PORT."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = int(server.getsockname()[1])
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(port)), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(rank_store, "_LATE", 0.5)
        yield port


@pytest.mark.parametrize(
    ("rank", "reason", "remedy"),
    [(0, "another program listens at port", "set MASTER_PORT to a free port"), (1, SILENT, "ss -ltnp")],
)
def test_a_foreign_program_at_the_port_ends_training(
    foreign: int, monkeypatch: pytest.MonkeyPatch, rank: int, reason: str, remedy: str
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(UsageError, match=rf"{reason}.*{remedy}"):
        fresh_store(rank, 2, WAIT)


@pytest.mark.parametrize(
    ("set_to", "said"),
    [
        ({}, "(not set):(not set): "),
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.0.1:(not set): "),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "127.0.0.1:x: "),
    ],
)
def test_a_missing_address_is_named(
    set_to: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_to.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused:
        fresh_store(0, 2, WAIT)
    assert str(refused.value).startswith(f"MASTER_ADDR and MASTER_PORT (rank 0): {said}")
    assert "; start the ranks with torchrun" in str(refused.value)
