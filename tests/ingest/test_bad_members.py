"""Members of a source in any order and form: which become pairs, which are refused, what waits."""

import json

import pytest

from sa1b.sources.pairing import Spill
from tests.ingest import inside
from tests.ingest.bad_pairs import BAD, GOOD, Outcome
from tests.shards import tiny
from tests.shards.tiny import pair, pair_members, pairs


@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
def test_good_pairs_in_any_order_come_back_exactly(ingest, gzip):
    outcome = ingest(pairs(GOOD), gzip=gzip)
    assert sorted(outcome.samples) == list(GOOD)
    assert outcome.refused == outcome.warnings == outcome.task.damage == []


@pytest.mark.parametrize(("missing", "reason"), [(1, "jpg_unpaired"), (0, "json_unpaired")])
def test_half_a_pair_is_refused(ingest, missing, reason):
    half = pair_members(BAD)[1 - missing]
    outcome = ingest([half, *pairs(GOOD)])
    assert [(line["reason"], line["name"], line["offset"]) for line in outcome.refused] == [
        (reason, half[0], 0)
    ]


@pytest.mark.parametrize("place", [1, 2], ids=["before the pair is complete", "after"])
@pytest.mark.parametrize("which", [0, 1], ids=["jpg", "json"])
@pytest.mark.parametrize("same", [True, False], ids=["same bytes", "other bytes"])
def test_the_first_of_duplicates_counts_and_the_others_are_listed(ingest, place, which, same):
    both = pair_members(BAD)
    first, second = both[which], both[1 - which]
    again = (first[0], first[1] if same else pair(BAD, seed=1)[which])
    members = [*pairs(GOOD), first, second]
    members.insert(len(GOOD) * 2 + place, again)
    outcome = ingest(members)
    assert outcome.samples[BAD] == (pair(BAD)[0], json.loads(pair(BAD)[1]))
    assert [(line["reason"], line["name"]) for line in outcome.refused] == [("duplicate", first[0])]


@pytest.mark.parametrize(
    "name",
    [
        "/sa_500.jpg",
        "/etc/passwd",
        "../sa_500.jpg",
        "../../../../tmp/sa_500.jpg",
        "./x/../sa_500.jpg",
        "x//sa_500.jpg",
        "sa_500.jpg/",
        "..",
        "sa_500.jpeg",
        "sa_0500.jpg",
        "sa_+500.jpg",
        "sa_-500.jpg",
        "sa_٥٠٠.jpg",
        "sa_500.jpg\n",
        "sa_500.jpg ",
        "sa_\x1b[2J500.jpg",
        "xsa_500.jpg",
        "sa_9223372036854775808.jpg",
        "sa_" + "9" * 80 + ".jpg",
        "README",
    ],
)
def test_a_name_of_another_form_is_refused_and_writes_nothing_outside(ingest, tmp_path, name):
    half = pair_members(BAD)[1]
    outcome = ingest([(name, b"content"), half, *pairs(GOOD)])
    assert [(line["reason"], line["name"]) for line in outcome.refused] == [
        ("unexpected_name", name),
        ("json_unpaired", half[0]),
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"root", "sa_000020.tar"}
    (file,) = (tmp_path / "root" / "quarantine" / "sa_000020").glob("000001*")
    assert file.read_bytes() == b"content"
    assert set(file.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def test_a_very_long_name_is_listed_in_full(tmp_path):
    name = "x" * 5000 + "/sa_1.txt"
    data = tiny.member("././@LongLink", name.encode() + b"\0", kind=b"L") + tiny.member("short", b"content")
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(data + tiny.tar_bytes(pairs(GOOD)))
    outcome = Outcome(tmp_path / "root", tiny.ingest_tar(path, tmp_path / "root"))
    outcome.check([(name, b"content")])
    assert [line["reason"] for line in outcome.refused] == ["unexpected_name"]


@pytest.mark.parametrize("name", ["sa_500.jpg", "./sa_500.jpg", "sa_000020/sa_500.jpg", "a/b/c/sa_500.jpg"])
def test_pairs_may_lie_in_folders_of_the_archive(ingest, name):
    outcome = ingest([*pairs(GOOD), (name, pair(BAD)[0]), pair_members(BAD)[1]])
    assert BAD in outcome.samples
    assert outcome.refused == []


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"6"], ids=lambda kind: kind.decode())
def test_links_and_devices_are_refused_and_not_followed(tmp_path, kind):
    link = tiny.header(f"./sa_{BAD}.jpg", kind=kind, link="/etc/passwd")
    members = [pair_members(BAD)[1], *pairs(GOOD)]
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(link + tiny.tar_bytes(members))
    outcome = Outcome(tmp_path / "root", tiny.ingest_tar(path, tmp_path / "root"))
    outcome.check([*members, (f"./sa_{BAD}.jpg", b"")])
    assert [(line["reason"], line["offset"]) for line in outcome.refused] == [
        ("not_a_file", 0),
        ("json_unpaired", 512),
    ]


def test_folders_in_the_archive_hold_nothing_of_their_own(tmp_path):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(tiny.header("./", kind=b"5") + tiny.tar_bytes(pairs(GOOD)))
    outcome = Outcome(tmp_path / "root", tiny.ingest_tar(path, tmp_path / "root")).check([])
    assert outcome.task.counts["members"] == 2 * len(GOOD)
    assert outcome.refused == []


@pytest.mark.parametrize("image_id", [0, 2**31, 2**63 - 1])
def test_image_ids_from_0_to_the_largest_int64_are_kept(ingest, image_id):
    assert image_id in ingest([*pairs(GOOD), *pair_members(image_id)]).samples


def test_what_waits_takes_bounded_memory_and_its_spill_folder_is_empty_afterwards(tmp_path, monkeypatch):
    spill = tmp_path / "spill"
    seen = []
    put = Spill.put

    def watched(self, name, data):
        put(self, name, data)
        seen.append((sum(map(len, self._memory.values())), len(list(spill.rglob("*.jpg")))))

    monkeypatch.setattr(Spill, "put", watched)
    worst = sorted(pairs(GOOD), key=lambda member: member[0].endswith("json"))  # every jpg before any json
    path = tiny.write_tar(tmp_path / "sa_000020.tar", worst)
    task = inside.ingest_tar(path, tmp_path / "root", spill=spill, spill_memory=10_000)
    outcome = Outcome(tmp_path / "root", task)
    assert sorted(outcome.samples) == list(GOOD)
    assert len(seen) == len(GOOD)
    assert max(memory for memory, _ in seen) <= 10_000
    assert max(files for _, files in seen) >= len(GOOD) - 5
    assert list(spill.rglob("*")) == []


def test_a_link_out_of_a_folder_is_refused_and_its_target_is_not_copied(tmp_path):
    folder, secret = tmp_path / "photos", tmp_path / "id_rsa"
    secret.write_bytes(b"a private key")
    folder.mkdir()
    for name, data in tiny.pairs([5, 6, 7]):
        (folder / name.removeprefix("./")).write_bytes(data)
    (folder / "kept").mkdir()
    (folder / "sa_6.jpg").rename(folder / "kept" / "x")
    (folder / "sa_6.jpg").symlink_to("kept/x")  # inside
    (folder / "sa_7.jpg").unlink()
    (folder / "sa_7.jpg").symlink_to(secret)
    task = tiny.ingest_tar(folder, tmp_path / "root")
    assert task.counts["images"] == 2
    lines = [
        json.loads(line) for line in (tmp_path / "root" / "quarantine" / "photos" / "refused.jsonl").open()
    ]
    assert any(line["name"] == "sa_7.jpg" and "link out of the folder" in line["message"] for line in lines)
    assert not [
        path for path in (tmp_path / "root").rglob("*") if path.is_file() and b"private" in path.read_bytes()
    ]


def renamed(image_id: int, name: str) -> list[tuple[str, bytes]]:
    """The members of a pair under another name."""
    return [(f"{name}.jpg", pair(image_id)[0]), (f"{name}.json", pair(image_id)[1])]


@pytest.mark.parametrize("turned", [False, True], ids=["jpg first", "json first"])
def test_neighbours_of_another_name_are_a_pair_by_the_id_in_their_json(ingest, turned):
    others = [
        member
        for number, one in enumerate(GOOD)
        for member in renamed(one, f"{number:06d}")[:: 1 - 2 * turned]
    ]
    outcome = ingest([*others, *pairs([BAD])])
    assert sorted(outcome.samples) == sorted([*GOOD, BAD])
    assert outcome.samples[GOOD[0]] == (pair(GOOD[0])[0], json.loads(pair(GOOD[0])[1]))
    assert outcome.refused == []


def test_a_text_beside_a_pair_is_refused_with_what_to_do(ingest):
    outcome = ingest([*renamed(BAD, "000007"), ("000007.txt", b"a cat"), *pairs(GOOD)])
    assert BAD in outcome.samples
    (refused,) = outcome.refused
    assert refused["name"] == "000007.txt"
    assert "pass --accept unexpected_name, and join them as a table of image_id" in refused["message"]


def test_other_names_that_are_no_neighbours_or_have_no_id_are_refused(ingest):
    image, text = renamed(BAD, "000007")
    nothing = [("000008.jpg", pair(BAD)[0]), ("000008.json", b'{"caption": "a cat"}')]
    again = renamed(GOOD[0], "000009")
    other = ("000010.jpg", pair(BAD)[0])
    outcome = ingest([image, *pairs(GOOD), text, *nothing, *again, other, other])
    assert sorted(outcome.samples) == sorted(GOOD)
    assert [(line["reason"], line["name"]) for line in outcome.refused] == [
        *(("unexpected_name", name) for name in ("000007.jpg", "000007.json", "000008.jpg", "000008.json")),
        *(("duplicate", name) for name in ("000009.jpg", "000009.json")),
        *(("unexpected_name", name) for name in ("000010.jpg", "000010.jpg")),
    ]
