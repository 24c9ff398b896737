"""The ranks' key-value store for the rendezvous, also after torchrun has restarted them."""

import os
import secrets
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from sa1b.errors import UsageError
from sa1b.limit import Limited, OverdueError

_LATE = 10.0  # seconds after the timeout of the store, which the constructor of TCPStore ignores


def fresh_store(rank: int, world_size: int, wait: timedelta) -> Store:
    """The ranks' store with a prefix that no earlier attempt has used.

    torchrun keeps one store over its restarts (torch 2.13, torch/distributed/elastic/rendezvous/
    dynamic_rendezvous.py), so ranks would find the addresses of dead ranks there. Therefore each rank writes
    a random token, and rank 0 answers each token with its own, until all ranks have confirmed it. The token
    of rank 0 is the prefix.

    Raises:
        DistStoreError: a rank did not answer in time.
        UsageError: MASTER_ADDR or MASTER_PORT is that of something else; the message has the remedy.
    """
    try:
        return Limited().call(lambda: _store(rank, world_size, wait), wait.total_seconds() + _LATE)
    except (OverdueError, dist.DistNetworkError) as error:
        reason, remedy = fault(error, serves=rank == 0)
        raise UsageError(f"MASTER_ADDR and MASTER_PORT (rank {rank}): {reason}; {remedy}") from None


def fault(error: Exception, *, serves: bool) -> tuple[str, str]:
    """Why the store at MASTER_ADDR and MASTER_PORT cannot be used, and what to do.

    Args:
        serves: this rank is the first one. It then has the store, unless torchrun has it.
    """
    host, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    here, serves = socket.gethostname(), serves and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves and "EADDRINUSE" in str(error):
        return (
            f"another program listens at port {port} of {here}",
            f"end it (ss -ltnp 'sport = :{port}' names it), or set MASTER_PORT to a free port on every rank",
        )
    if serves and not _is_here(host):
        return (
            f"{host} is an address of another machine, and rank 0, which has the store, runs on {here}",
            f"set MASTER_ADDR to a name or address of {here} on every rank, or start rank 0 on {host}",
        )
    if isinstance(error, OverdueError):
        return (
            f"{host}:{port} accepts connections and does not answer ({error})",
            f"look on {host} which program listens there (ss -ltnp 'sport = :{port}'): if it is not rank 0 "
            "or its torchrun, set MASTER_PORT to a free port on every rank; else that process hangs",
        )
    return (
        f"{host}:{port}: {(str(error).splitlines() or [type(error).__name__])[0]}",
        f"check that rank 0 runs, that the name resolves on {here} (getent hosts), and that no firewall "
        f"blocks the port (nc -zv {host} {port})",
    )


def _is_here(host: str) -> bool:
    """Whether a name or address is one of this machine; True if it is not known."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
    except socket.gaierror:
        return True
    except OSError:
        return False
    return True


def _store(rank: int, world_size: int, wait: timedelta) -> Store:
    store: Store = next(rendezvous("env://", rank, world_size, timeout=wait))[0]
    store.set_timeout(wait)
    token = secrets.token_hex(8)
    if rank > 0:
        store.set(f"token/{rank}", token)
        prefix = store.get(f"prefix/{token}").decode()
        store.set(f"confirmed/{prefix}/{rank}", token)
        return PrefixStore(prefix, store)
    missing = set(range(1, world_size))
    end = time.monotonic() + wait.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"token/{other}"]):  # the token may belong to a dead rank
                store.set(f"prefix/{store.get(f'token/{other}').decode()}", token)
        missing -= {other for other in missing if store.check([f"confirmed/{token}/{other}"])}
        if time.monotonic() > end:
            raise dist.DistStoreError(f"ranks {sorted(missing)} did not answer in {wait}")
        time.sleep(0.01)
    return PrefixStore(token, store)
