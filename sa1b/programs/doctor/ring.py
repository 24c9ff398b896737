"""A ring all-reduce of point-to-point messages: how the collective works, and a test of each link.

The N ranks form a ring, in which each sends to the next one only, and the tensor has N chunks. In step s of
the first N - 1 steps (reduce-scatter), rank r sends chunk r - s, adds what it receives to chunk r - s - 1,
and so, at the end, has the complete sum of chunk r + 1 (all modulo N). In N - 1 further steps (all-gather),
rank r sends chunk r + 1 - s. For D bytes, all ranks together send 2 (N - 1) D bytes. This is 2 (N -
1) / N D for each rank if N divides the elements; else the chunks, and so the ranks, differ by an element or
two. No algorithm sends less (Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of
workstations, 2009).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sa1b.programs.doctor.check import RankExchange, RankProcess
from sa1b.programs.doctor.report import LINES, Finding, State
from sa1b.programs.doctor.synchronisation import joined

RING = "ring"
_ELEMENTS = (1 << 20) + 1  # float32, 4 MB
_REPEATS = 3
_SLOW = 3.0  # times the median of the links

Alter = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Measured:
    host: str
    error: tuple[int, str] | None  # step and description of the first wrong chunk; None: right results
    ring_seconds: float
    all_reduce_seconds: float
    sent_bytes: int  # in one ring all-reduce
    link_seconds: float  # of a message to the next rank and its answer


@dataclass(frozen=True, slots=True)
class Step:
    """The chunks, by number, that a rank sends and receives in a step."""

    sends: int
    receives: int
    adds: bool  # the received chunk is added, as in a reduce-scatter; else it replaces the chunk


def steps_of(rank: int, world_size: int) -> list[Step]:
    """The 2 (N - 1) steps of a rank."""
    reduce = [
        Step((rank - step) % world_size, (rank - step - 1) % world_size, True)
        for step in range(world_size - 1)
    ]
    gather = [
        Step((rank + 1 - step) % world_size, (rank - step) % world_size, False)
        for step in range(world_size - 1)
    ]
    return reduce + gather


def ring_all_reduce(
    values: Tensor, rank: int, world_size: int, received: Alter = lambda step, chunk: None
) -> int:
    """Sum a tensor of one dimension over all ranks, in place; the bytes that this rank has sent. Collective.

    `received` is called with the number of the step and each chunk as it was received, which it may change.
    """
    chunks = values.tensor_split(world_size)
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    sent_bytes = 0
    for number, step in enumerate(steps_of(rank, world_size)):
        target = chunks[step.receives]
        buffer = torch.empty_like(target) if step.adds else target
        # A chunk is empty if there are fewer elements than ranks. Sender and receiver both skip it.
        transfers = [
            dist.P2POp(call, chunk, peer)
            for call, chunk, peer in (
                (dist.isend, chunks[step.sends], following),
                (dist.irecv, buffer, previous),
            )
            if chunk.numel()
        ]
        for work in dist.batch_isend_irecv(transfers) if transfers else ():
            work.wait()
        sent_bytes += chunks[step.sends].nbytes
        received(number, buffer)
        if step.adds:
            target += buffer
    return sent_bytes


def timeline(world_size: int) -> list[str]:
    """Who sends which chunk to whom, one line for each step."""
    programs = [steps_of(rank, world_size) for rank in range(world_size)]
    lines = []
    for number in range(2 * (world_size - 1)):
        phase = "reduce-scatter" if programs[0][number].adds else "all-gather"
        messages = [
            f"{rank} -[{steps[number].sends}]-> {(rank + 1) % world_size}"
            for rank, steps in enumerate(programs)
        ]
        more = [f"and {world_size - 8} more"] if world_size > 8 else []
        lines.append(f"step {number + 1:<2} {phase:<14}  {'   '.join(messages[:8] + more)}")
    return lines if len(lines) <= 16 else [*lines[:8], "...", *lines[-2:]]


def numbers(rank: int, length: int, device: torch.device) -> Tensor:
    """The values of a rank: small integers in float32, whose sums in any order are exact."""
    return (torch.arange(length, device=device) % 13 + rank % 64).float()


def first_error(
    rank: int, world_size: int, length: int, device: torch.device, received: Alter
) -> tuple[int, str] | None:
    """Step and description of the first wrong chunk that this rank receives; None: the result is right."""
    errors: list[tuple[int, str]] = []
    programs = steps_of(rank, world_size)

    def verify(number: int, buffer: Tensor) -> None:
        received(number, buffer)
        step = programs[number]
        # In step s of the reduce-scatter, rank - 1 sends the sum of the chunks of s + 1 ranks.
        senders = range(number + 1) if step.adds else range(world_size)
        expected = torch.stack(
            [
                numbers((rank - 1 - other) % world_size, length, device).tensor_split(world_size)[
                    step.receives
                ]
                for other in senders
            ]
        ).sum(0)
        bad = (buffer != expected).nonzero().flatten()
        if len(bad):
            at = int(bad[0])
            text = (
                f"{length:,} elements, step {number + 1}, link {(rank - 1) % world_size} -> {rank}, "
                f"chunk {step.receives}: "
                f"element {at} is {buffer[at].item():g}, expected {expected[at].item():g}"
            )
            errors.append((number, text))

    values = numbers(rank, length, device)
    reference = values.clone()
    ring_all_reduce(values, rank, world_size, verify)
    dist.all_reduce(reference)
    if not errors and not torch.equal(values, reference):
        text = f"{length:,} elements: the result differs from that of dist.all_reduce"
        errors.append((len(programs), text))
    return errors[0] if errors else None


def link_seconds(
    rank: int, world_size: int, device: torch.device, delay: Callable[[], None], length: int
) -> float:
    """Seconds of a message to the next rank and of its short answer, the minimum of several. Collective."""
    # No rank has two messages at the same time: links 0, 2, 4, ... are used first, then 1, 3, ..., and for an
    # odd number of ranks the last link alone.
    data, answer = torch.zeros(length, device=device), torch.zeros(1, device=device)
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    odd = world_size % 2
    turn_of = [2 if odd and link == world_size - 1 else link % 2 for link in range(world_size)]
    best = float("inf")
    for turn in range(3 if odd else 2):
        for _ in range(_REPEATS):
            dist.barrier()
            if turn_of[rank] == turn:
                begin = time.perf_counter()
                delay()
                dist.send(data, following)
                dist.recv(answer, following)
                answer.cpu()  # with NCCL, waits for the end
                best = min(best, time.perf_counter() - begin)
            elif turn_of[previous] == turn:
                dist.recv(data, previous)
                dist.send(answer, previous)
    return best


def ring(
    process: RankProcess,
    exchange: RankExchange,
    *,
    received: Alter = lambda step, chunk: None,
    delay: Callable[[], None] = lambda: None,
    lengths: tuple[int, ...] | None = None,
) -> Iterator[Finding]:
    """Ring all-reduces of several sizes, compared with `dist.all_reduce`, and the time of each link.

    `received`: see `ring_all_reduce`. `delay` is called before each message to the next rank when the links
    are timed. `lengths`: numbers of elements; the defaults include some that the number of ranks does not
    divide.
    """
    rank_info = joined(process)
    rank, count, device = process.rank, process.world_size, rank_info.device
    small = lengths or (count - 1, count, count + 1, 1000 * count + 1)
    errors = [first_error(rank, count, length, device, received) for length in small]
    values = numbers(rank, _ELEMENTS, device)
    sent: list[int] = []
    measured = Measured(
        host=process.host,
        error=min((error for error in errors if error is not None), default=None),
        ring_seconds=_seconds(lambda: sent.append(ring_all_reduce(values, rank, count)), device),
        all_reduce_seconds=_seconds(lambda: dist.all_reduce(values), device),
        sent_bytes=sent[0],
        link_seconds=link_seconds(rank, count, device, delay, _ELEMENTS // count),
    )
    exchange.send("ring/measured", measured)
    if rank == 0:
        answers = exchange.receive("ring/measured")
        if len(answers) == count:  # otherwise the caller reports the ranks that did not answer
            yield ring_finding([answers[number] for number in range(count)])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of a collective on this rank, the minimum of several; the first call does not count."""
    best = float("inf")
    for number in range(_REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number > 0:
            best = min(best, time.perf_counter() - begin)
    return best


def ring_finding(ranks: Sequence[Measured]) -> Finding:
    """The finding about what all ranks measured: a wrong chunk, the bytes, the slowest link."""
    count, size = len(ranks), 4 * _ELEMENTS
    total, expected = sum(measured.sent_bytes for measured in ranks), 2 * (count - 1) * size
    ring_s = max(measured.ring_seconds for measured in ranks)
    torch_s = max(measured.all_reduce_seconds for measured in ranks)
    links = [measured.link_seconds for measured in ranks]
    slowest = max(range(count), key=lambda link: links[link])
    others = sorted(links[:slowest] + links[slowest + 1 :])
    median = others[len(others) // 2]
    values = {
        "ring_seconds": ring_s,
        "all_reduce_seconds": torch_s,
        "sent_bytes": [measured.sent_bytes for measured in ranks],
        "expected_bytes_of_all": expected,
        "link_seconds": links,
        "slowest_link": [slowest, (slowest + 1) % count],
        LINES: [
            f"ring of {count} ranks, {size:,} bytes in {count} chunks; 0 -[2]-> 1: rank 0 sends chunk 2 to 1",
            *timeline(count),
            f"sent by all ranks: {total:,} bytes; 2 (N - 1) D = {expected:,}",
            f"sent by each rank: {total / count:,.0f} bytes; 2 (N - 1) / N D = {expected / count:,.0f}",
            f"time: {ring_s * 1000:.2f} ms; dist.all_reduce: {torch_s * 1000:.2f} ms",
            *(
                f"link {_link(link, ranks)}: {links[link] * 1000:.2f} ms"
                for link in sorted(range(count), key=lambda link: -links[link])[:8]
            ),
        ],
    }

    def finding(state: State, figure: str, remedy: str = "", of: Sequence[int] = range(count)) -> Finding:
        hosts = ", ".join(dict.fromkeys(ranks[rank].host for rank in of))
        return Finding(RING, state, figure, remedy=remedy, ranks=tuple(of), host=hosts, values=values)

    wrong = [(*measured.error, rank) for rank, measured in enumerate(ranks) if measured.error is not None]
    if wrong:
        # A wrong chunk is sent on, so the link of the first step is the one that changed it.
        _, text, rank = min(wrong)
        remedy = (
            "The data are changed on the way: test adapters, cables and memory of both ranks of the link "
            "(dcgmi diag -r 3, ibdiagnet, ethtool -S)"
        )
        return finding("failed", text, remedy, sorted({rank, (rank - 1) % count}))
    if total != expected:
        text = f"{total:,} bytes were sent, expected {expected:,}"
        return finding("failed", text, "Report this with the output of --json")
    if links[slowest] > _SLOW * median:
        times = f"{links[slowest] * 1000:.2f} ms, others {median * 1000:.2f} ms"
        text = f"link {_link(slowest, ranks)} takes {times}"
        remedy = (
            "Compare both ranks with the others: rate and errors of the port (ibstat, ethtool -S), lanes of "
            "PCIe (nvidia-smi topo -m), other jobs of these hosts"
        )
        return finding("warning", text, remedy, sorted({slowest, (slowest + 1) % count}))
    text = f"{size / 1e6:.1f} MB in {ring_s * 1000:.2f} ms, by dist.all_reduce in {torch_s * 1000:.2f} ms; "
    return finding("ok", f"{text}slowest link {_link(slowest, ranks)}")


def _link(link: int, ranks: Sequence[Measured]) -> str:
    following = (link + 1) % len(ranks)
    hosts = dict.fromkeys((ranks[link].host, ranks[following].host))
    return f"{link} -> {following} ({' -> '.join(hosts)})"
