"""The ranks' key-value store for the rendezvous, also after torchrun has restarted them."""

import secrets
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous


def fresh_store(rank: int, world_size: int, wait: timedelta) -> Store:
    """The ranks' store with a prefix that no earlier attempt has used.

    torchrun keeps one store over its restarts (torch 2.13, torch/distributed/elastic/rendezvous/
    dynamic_rendezvous.py), so ranks would find the addresses of dead ranks there. Therefore each rank writes
    a random token, and rank 0 answers each token with its own, until all ranks have confirmed it. The token
    of rank 0 is the prefix.

    Raises:
        DistStoreError: a rank did not answer in time.
    """
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
