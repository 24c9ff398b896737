"""A source with more than 10,000 shards: their numbers get a fifth digit, and their order stays that of parts."""

import sa1b
from tests.kit import run
from tests.shards.tiny import make_tar

IDS = range(100, 104)


def test_part_10_000_follows_part_9_999_everywhere(tmp_path):
    # Four shards of one image; only their numbers are those of a large source.
    tar, root = tmp_path / "sa_000020.tar", tmp_path / "root"
    make_tar(tar, IDS)
    sa1b.reshard(tar, root, images_per_shard=1, quiet=True)
    task = (root / "tasks" / "sa_000020.json").read_text()
    for part in reversed(range(4)):
        for path in root.glob(f"sa1b-000020-{part:04d}.*"):
            path.rename(path.with_stem(f"sa1b-000020-{9998 + part}"))
        task = task.replace(f"sa1b-000020-{part:04d}.", f"sa1b-000020-{9998 + part}.")
    (root / "tasks" / "sa_000020.json").write_text(task)
    (root / "dataset.json").unlink()
    assert sa1b.reshard(tar, root, images_per_shard=1, quiet=True).skipped == ["sa_000020"]
    expected = [f"sa1b-000020-{part}.tar" for part in ("9998", "9999", "10000", "10001")]
    dataset = sa1b.open(root)
    assert [shard["name"] for shard in dataset.manifest["shards"]] == list(dataset.shards) == expected
    order = [dataset.table.image_id[dataset.table.shard == number].item() for number in range(4)]
    assert sorted(order) == list(IDS)
    assert run("verify", root, "--json").json["findings"] == []
