"""What dooms a source ends it when it happens, not after the last image."""

import json
from concurrent.futures import Future

import pytest

from sa1b.errors import ShardError, SystematicError
from sa1b.ingest import policy, source_pass
from sa1b.ingest.policy import SystematicCheck
from sa1b.shards.annotation_columns import ImageWarning
from sa1b.shards.quarantine import Quarantine
from sa1b.sources.source import SourceReader
from tests.ingest import inside
from tests.shards import tiny

PAIRS = 300
EARLY = 200  # pairs before the first check, instead of 1,000


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A tar of many pairs, neighbours, every one of them with a wrong area."""
    jpeg, text = tiny.pair(1, size=(16, 16))
    found = json.loads(text)
    found["annotations"][0]["area"] += 1
    members = []
    for image_id in range(PAIRS):
        found["image"] |= {"image_id": image_id, "file_name": f"sa_{image_id}.jpg"}
        members += tiny.pair_members(image_id, jpeg, tiny.encode(found))
    return tiny.write_tar(tmp_path_factory.mktemp("many") / "sa_000020.tar", members, gzip=False)


@pytest.fixture
def members_read(monkeypatch):
    """How many members have been read of the source."""
    count = [0]
    items = SourceReader.items

    def counted(self):
        for item in items(self):
            count[0] += 1
            yield item

    monkeypatch.setattr(SourceReader, "items", counted)
    # No more than a few members ahead, so that what was read says when the source was stopped.
    monkeypatch.setattr(source_pass, "_QUEUE_BYTES", 1)
    monkeypatch.setattr(policy, "_EARLY_PAIRS", EARLY)
    return count


def test_a_source_with_a_systematic_problem_ends_long_before_its_end(many, tmp_path, members_read):
    with pytest.raises(SystematicError) as error:
        inside.ingest_tar(many, tmp_path / "root")
    assert "pairs have the problem 'area', too many to be chance" in str(error.value)
    assert str(error.value).endswith("run again with --accept area")
    assert 2 * EARLY <= members_read[0] < 2 * EARLY + 100


def test_an_accepted_reason_stops_nothing(many, tmp_path, members_read):
    task = inside.ingest_tar(many, tmp_path / "root", accept=frozenset({"area"}))
    assert task.counts["images"] == PAIRS
    assert members_read[0] == 2 * PAIRS


def counted(tmp_path, bad, good):
    quarantine = Quarantine(tmp_path / "quarantine")
    for image_id in range(bad):
        quarantine.warn(image_id, "area", ImageWarning("odd"))
    return quarantine, bad + good


@pytest.mark.parametrize(
    ("bad", "good", "fraction", "stops"),
    [
        (999, 0, 0.1, False),  # too few to judge by
        (1000, 0, 0.03, True),  # all of them
        (1000, 0, 0.01, False),  # would be 1 % of 100,000: the rest may be good
        (20, 1980, 1.0, False),  # as many as may be chance
        (39, 1961, 1.0, False),  # not twice the limit: left to the end of the source
        (41, 1959, 1.0, True),
        (41, 1959, 0.5, False),
    ],
)
def test_a_source_is_stopped_early_only_if_the_rest_cannot_change_the_verdict(
    tmp_path, bad, good, fraction, stops
):
    quarantine, pairs = counted(tmp_path, bad, good)
    check = SystematicCheck("x.tar", 1_000_000, frozenset())
    arguments = (quarantine, pairs, 2 * pairs, int(1_000_000 * fraction))
    if not stops:
        check.check_early(*arguments)
        return
    with pytest.raises(SystematicError):
        check.check_early(*arguments)
    # The rest of the source, of the density seen, without another bad pair: the same verdict.
    with pytest.raises(SystematicError):
        check.check(quarantine, int(pairs / fraction))


def test_halves_that_wait_count_as_pairs_to_come(tmp_path):
    """In a tar in random order a tenth of the members makes a hundredth of the pairs."""
    quarantine, pairs = counted(tmp_path, 100, 0)
    SystematicCheck("x.tar", 1_000_000, frozenset()).check_early(quarantine, pairs, 2000, 100_000)


def test_a_shard_that_does_not_read_back_ends_the_source_with_the_next_image(
    many, tmp_path, members_read, monkeypatch
):
    def seal(path):
        raise ShardError(f"{path}: does not read back as written")

    class AtOnce:
        """Seals in the calling thread: the result is there when the next image comes."""

        def submit(self, function, *arguments):
            future = Future()
            try:
                future.set_result(function(*arguments))
            except ShardError as error:
                future.set_exception(error)
            return future

        def __enter__(self):
            return self

        def __exit__(self, *arguments):
            pass

    monkeypatch.setattr(source_pass, "seal", seal)
    monkeypatch.setattr("sa1b.ingest.ingest.ThreadPoolExecutor", lambda threads: AtOnce())
    with pytest.raises(ShardError, match="does not read back"):
        inside.ingest_tar(many, tmp_path / "root", images_per_shard=10, accept=frozenset({"area"}))
    assert members_read[0] < 40
