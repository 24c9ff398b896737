"""How can N ranks sum D bytes while each sends less than 2 D, however many they are?

    torchrun --nproc_per_node=4 examples/distributed/ring_allreduce.py --megabytes 64
    torchrun --nproc_per_node=4 examples/distributed/ring_allreduce.py --picture ring.png

A ring divides the data into N chunks. In N - 1 steps each rank adds a chunk from its left neighbour to its
own and passes the sum on (reduce-scatter); then each rank has one complete chunk. In N - 1 more steps the
complete chunks go around (all-gather). Each rank sends 2 (N - 1) chunks of D / N bytes. The gradient of DDP
is summed so. Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(data: Tensor, rank: int, ranks: int, note: Callable[[int, list[int]], None]) -> int:
    """Sum `data` [D] over all ranks in place; return the bytes that this rank has sent."""
    size = -(-len(data) // ranks)
    padded = data.new_zeros(size * ranks)
    padded[: len(data)] = data
    chunks = padded.view(ranks, size)
    received, sent, summands = torch.empty_like(chunks[0]), 0, [1] * ranks  # of each chunk
    note(0, summands)
    for step in range(2 * (ranks - 1)):
        outgoing, incoming = (rank - step) % ranks, (rank - step - 1) % ranks
        requests = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, chunks[outgoing].clone(), (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ])  # fmt: skip
        for request in requests:
            request.wait()
        sent += chunks[outgoing].nbytes
        if step < ranks - 1:
            chunks[incoming] += received
            summands[incoming] = step + 2
        else:
            chunks[incoming] = received
            summands[incoming] = ranks
        note(step + 1, summands)
    data.copy_(padded[: len(data)])
    return sent


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """The shortest of some runs."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def draw(path: str, steps: list[list[list[int]]]) -> None:
    """One square for each step: rows are ranks, columns chunks, the number is that of summands."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = len(steps[0])
    figure, axes = pyplot.subplots(1, len(steps), figsize=(1.6 * len(steps), 2.2), layout="constrained")
    for number, (axis, table) in enumerate(zip(axes, steps, strict=True)):
        axis.imshow(table, vmin=0, vmax=ranks, cmap="Blues")
        for row, column in ((row, column) for row in range(ranks) for column in range(ranks)):
            count = table[row][column]
            axis.text(
                column, row, count, ha="center", va="center", color="white" if count > ranks / 2 else "black"
            )
        name = (
            "start" if number == 0 else f"add {number}" if number < ranks else f"pass on {number - ranks + 1}"
        )
        axis.set(title=name, xlabel="chunk", xticks=range(ranks), yticks=range(ranks))
    axes[0].set_ylabel("rank")
    figure.suptitle("Summands in each chunk of each rank", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=16, help="D, of float32 numbers on each rank (16)")
    parser.add_argument("--repeats", type=int, default=5, help="the shortest counts (5)")
    parser.add_argument("--picture", help="file of a picture of the steps")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    count = int(args.megabytes * 1e6) // 4
    data = torch.randint(0, 1000, (count,), generator=torch.Generator().manual_seed(rank)).float()
    expected, summed = data.clone(), data.clone()
    dist.all_reduce(expected)
    steps: list[list[int]] = []
    sent = ring_all_reduce(summed, rank, ranks, lambda step, summands: steps.append(list(summands)))
    ours = seconds_of(lambda: ring_all_reduce(data.clone(), rank, ranks, lambda *_: None), args.repeats)
    theirs = seconds_of(lambda: dist.all_reduce(data.clone()), args.repeats)
    found: list[tuple[bool, int, list[list[int]]]] = [(False, 0, [])] * ranks
    dist.all_gather_object(found, (torch.equal(summed, expected), sent, steps))
    if rank == 0:
        bound = 2 * (ranks - 1) / ranks * data.nbytes
        print((__doc__ or "").splitlines()[0])
        same, sent = all(same for same, *_ in found), max(sent for _, sent, _ in found)
        print(f"{ranks} ranks sum {data.nbytes:,} bytes each; equal to dist.all_reduce: {same}")
        print(f"sent by each rank: {sent:,} bytes; 2 (N - 1) / N D = {bound:,.0f}")
        print(f"seconds: this ring {ours:.4f}, dist.all_reduce {theirs:.4f}")
        if args.picture:
            draw(args.picture, [[steps[number] for _, _, steps in found] for number in range(2 * ranks - 1)])
            print(args.picture)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
