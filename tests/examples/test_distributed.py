"""The programs that answer questions about distributed training, each on two ranks."""

import re

from tests.examples.test_examples import folder, material, run

__all__ = ["folder", "material"]  # fixtures

TWO = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
SMALL = ("shards", "--batch", 4, "--image-size", 64)


def table(printed, *kinds):
    """Rows of a table whose first columns are of these kinds."""
    rows = [line.split() for line in printed.splitlines()]
    found = []
    for row in rows:
        try:
            found.append([kind(word.rstrip("%,")) for kind, word in zip(kinds, row, strict=False)])
        except ValueError:
            continue
    return [row for row in found if len(row) == len(kinds)]


def test_a_ring_sums_as_torch_does_and_sends_what_the_formula_says(folder):
    printed = run(
        folder, "distributed/ring_allreduce.py", "--megabytes", 1, "--repeats", 1,
        "--picture", "ring.png", launcher=TWO,
    )  # fmt: skip
    assert "equal to dist.all_reduce: True" in printed
    assert "sent by each rank: 1,000,000 bytes; 2 (N - 1) / N D = 1,000,000" in printed
    assert (folder / "ring.png").read_bytes().startswith(b"\x89PNG")


def test_powersgd_sends_less_and_trains_to_about_the_same_loss(folder):
    printed = run(folder, "distributed/powersgd.py", *SMALL, "--steps", 8, "--rank", 2, launcher=TWO)
    steps = table(printed, int, float, float, float, float)
    assert [row[0] for row in steps] == list(range(1, 9))
    assert all(without == low and sent == less for _, without, low, sent, less in steps[:2])
    assert all(0 < 5 * less < sent for _, _, _, sent, less in steps[2:])
    assert steps[-1][1] != steps[-1][2]  # an approximation
    assert abs(steps[-1][1] - steps[-1][2]) < 0.1 * steps[-1][1]


def test_zero_divides_what_it_says_with_equal_losses(folder):
    printed = run(folder, "distributed/zero.py", *SMALL, "--steps", 3, launcher=TWO)
    rows = {name: held for name, *held in table(printed, str, float, float, float, float)}
    whole = rows["ddp"]
    for mode, parts in {"zero": (1, 1, 2), "grad_op": (2, 2, 2), "full": (2, 2, 2)}.items():
        for had, has, part in zip(whole, rows[mode], parts, strict=False):
            assert abs(part * has / had - 1) < 0.1
    assert float(re.search(r"largest difference of a loss: (\S+)", printed)[1]) < 1e-5


def test_a_pipeline_has_the_gradients_of_the_whole_and_1f1b_fewer_activations(folder):
    printed = run(folder, "distributed/pipeline.py", "shards", "--micro-batches", 2, 4, launcher=TWO)
    rows = table(printed, str, int, float, float, int, float, float, float, float)
    assert [(name, count, kept) for name, count, _, _, kept, *_ in rows] == [
        *(("gpipe", 2, 2), ("gpipe", 4, 4), ("1f1b", 2, 2), ("1f1b", 4, 2))
    ]
    for _, count, _, formula, _, _, loss, whole, gradients in rows:
        assert formula == round(100 / (count + 1))
        assert abs(loss - whole) < 1e-5
        assert gradients < 1e-4


def test_unequal_shares_have_the_gradient_of_the_whole_batch(folder):
    printed = run(
        folder, "distributed/unequal_gpus.py", "shards", "--batch", 6, "--image-size", 64, "--steps", 2,
        launcher=TWO,
    )  # fmt: skip
    assert re.findall(r"rank (\d): (\d) images", printed) == [("0", "4"), ("1", "2")] * 2
    assert all(float(within) < 1e-5 for within in re.findall(r"gradient within (\S+)", printed))
    assert len(re.findall("gradient within", printed)) == 2
