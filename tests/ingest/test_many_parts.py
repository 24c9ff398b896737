"""A source with more than 10,000 shards: their numbers get a fifth digit, and their order stays that of parts."""

import sa1b
from sa1b.ingest import source_pass
from sa1b.names import shard_name
from tests.ingest import inside
from tests.shards import tiny
from tests.shards.tiny import make_tar

IDS = range(100, 104)


def test_part_10_000_follows_part_9_999_everywhere(tmp_path, monkeypatch):
    # Four shards of one image; only their numbers are those of a large source.
    monkeypatch.setattr(source_pass, "shard_name", lambda source, part: shard_name(source, 9_998 + part))
    make_tar(tmp_path / "sa_000020.tar", IDS)
    task = inside.ingest_tar(tmp_path / "sa_000020.tar", tmp_path / "root", images_per_shard=1)
    expected = [f"sa1b-000020-{part}.tar" for part in ("9998", "9999", "10000", "10001")]
    assert [shard.name for shard in task.shards] == expected
    assert tiny.read_back(tmp_path / "root").keys() == set(IDS)
    dataset = sa1b.open(tmp_path / "root")
    assert list(dataset.shards) == expected
    order = [dataset.table.image_id[dataset.table.shard == number].item() for number in range(4)]
    assert sorted(order) == list(IDS)
