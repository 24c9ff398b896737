"""A source with many bad pairs, or nothing else: when it is stopped, and with which message."""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

import sa1b
from sa1b.errors import SourceError
from tests import processes
from tests.ingest.bad_pairs import BAD, GOOD, Outcome, mask_changed, with_counts
from tests.shards import tiny
from tests.shards.tiny import document, encode, pair_members, pairs


def with_bad(count, total):
    """`total` pairs, `count` of them with a wrong area."""
    members = []
    for image_id in range(1000, 1000 + total):
        found = document(image_id)
        if image_id < 1000 + count:
            found["annotations"][0]["area"] += 1
        members += pair_members(image_id, text=encode(found))
    return members


@pytest.fixture
def count_bad(tmp_path):
    def count_bad(count, total, **options):
        path = tiny.write_tar(tmp_path / "sa_000020.tar", with_bad(count, total), gzip=False)
        return tiny.ingest_tar(path, tmp_path / "root", **options)

    return count_bad


def test_examples_of_refused_pairs_say_where_they_stand(tmp_path):
    members = [member for image_id in range(1000, 1030) for member in pair_members(image_id, jpeg=b"")]
    path = tiny.write_tar(tmp_path / "sa_000020.tar", members, gzip=False)
    with pytest.raises(SourceError) as error:
        tiny.ingest_tar(path, tmp_path / "root")
    assert "\n  ./sa_1000.jpg at offset 0 + ./sa_1000.json at offset 512: image begins with" in str(
        error.value
    )


def test_twenty_pairs_bad_for_one_reason_are_chance(count_bad):
    assert count_bad(20, 30).warnings == {"area": 20}


def test_more_than_twenty_of_few_pairs_stop_the_run_with_examples_and_the_flag(count_bad, tmp_path):
    with pytest.raises(SourceError) as error:
        count_bad(21, 30)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'sa_000020.tar'}: 21 of 30 pairs have the problem 'area'")
    assert all(f"\n  sa_{image_id}: mask 0: area" in message for image_id in (1000, 1001, 1002))
    assert message.count("\n  ") == 3
    assert message.endswith("run again with --accept area")
    assert not list((tmp_path / "root").glob("*.tar"))
    assert not list((tmp_path / "root").rglob("sa_*.json"))


def test_an_accepted_reason_may_be_frequent_and_no_other(count_bad):
    with pytest.raises(SourceError, match="--accept area"):
        count_bad(30, 30, accept={"bbox"})
    assert count_bad(30, 30, accept={"area"}).warnings == {"area": 30}


def small_pairs(count, *bad):
    """The members of many small pairs, each image's beside each other; `bad` have a wrong area."""
    jpeg, text = tiny.pair(1, size=(16, 16))
    found, members = json.loads(text), []
    area = found["annotations"][0]["area"]
    for image_id in range(count):
        found["image"] |= {"image_id": image_id, "file_name": f"sa_{image_id}.jpg"}
        found["annotations"][0]["area"] = area + (image_id in bad)
        members += pair_members(image_id, jpeg, encode(found))
    return members


@pytest.mark.parametrize(("count", "bad"), [(2100, 21), (2099, 21), (1200, 1200)])
def test_a_reason_is_too_frequent_over_one_percent_of_many_pairs(tmp_path, count, bad):
    """And no verdict is given before the end unless the rest cannot change it, whatever order the members have."""
    members = small_pairs(count, *range(bad))
    if (
        bad < count
    ):  # 20 bad pairs, then all other images and the last bad pair before the annotations of the others
        good = members[2 * bad :]
        members = [*members[: 2 * bad - 2], *good[::2], *members[2 * bad - 2 : 2 * bad], *good[1::2]]
    path = tiny.write_tar(tmp_path / "sa_000020.tar", members, gzip=False)
    made = sa1b.reshard(path, tmp_path / "root", quiet=True)
    if count == 2100:
        assert (made.exit_code, made.images, made.document["warnings"]) == (0, 2100, {"area": 21})
        return
    pairs_seen = "1,000 of 1,000" if bad == count else "21 of 2,099"  # the first ends long before its end
    assert made.failed["sa_000020"].startswith(f"{path}: {pairs_seen} pairs have the problem 'area'")
    assert not list((tmp_path / "root").glob("*.tar"))


def test_partners_lost_to_damage_are_no_system(tmp_path):
    members = sorted(pairs(range(1000, 1060)), key=lambda item: item[0].endswith("json"))
    stored = tiny.gzip_bytes(tiny.tar_bytes(members))
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(stored[: len(stored) * 9 // 10])
    outcome = Outcome(tmp_path / "root", tiny.ingest_tar(path, tmp_path / "root"))
    lost = outcome.task.counts["refused"]["jpg_partner_lost"]
    assert 20 < lost == 60 - outcome.task.counts["images"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"nonsense", "invalid_json: annotation file is not JSON"),
        (with_counts("p"), "bad_rle: mask 1: a character of its string lies outside 48..111"),
    ],
)
def test_on_error_stop_ends_with_the_first_refusal_naming_file_members_and_offset(tmp_path, text, says):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", [*pair_members(BAD, text=text), *pairs(GOOD)])
    with pytest.raises(SourceError) as error:
        tiny.ingest_tar(path, tmp_path / "root", stop=True)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'sa_000020.tar'}: './sa_500.jpg' at offset 0, './sa_500.json' at")
    assert says in message
    assert not list((tmp_path / "root").glob("*.tar"))


def test_on_error_stop_ends_with_damage_too(tmp_path):
    path = tmp_path / "sa_000020.tar"
    path.write_bytes(tiny.tar_bytes(pairs(GOOD), end=b""))
    with pytest.raises(SourceError, match=r"sa_000020.tar: at offset [0-9,]+: the archive ends without"):
        tiny.ingest_tar(path, tmp_path / "root", stop=True)


def test_on_error_stop_lets_odd_pairs_pass(bad_pair):
    assert BAD in bad_pair(text=mask_changed(area=7), stop=True).samples


@pytest.mark.parametrize(
    "members", [[], [("README", b"")], pair_members(BAD, jpeg=b"x")], ids=["empty", "other", "one bad pair"]
)
def test_a_source_without_a_usable_pair_is_an_error_that_says_why(tmp_path, members):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", members)
    with pytest.raises(SourceError, match=r"sa_000020.tar: no usable pair; .*(empty|unexpected|not_a_jpeg)"):
        tiny.ingest_tar(path, tmp_path / "root")


def test_a_wrong_md5_is_an_error_that_names_both(tmp_path):
    path = tiny.write_tar(tmp_path / "sa_000020.tar", pairs(GOOD))
    (tmp_path / "md5.txt").write_text(f"{'0' * 32}  {path.name}\n")
    with pytest.raises(SourceError, match=r"sa_000020.tar: md5 is [0-9a-f]{32}, the checklist has 0{32}"):
        tiny.ingest_tar(path, tmp_path / "root", md5=tmp_path / "md5.txt")
    assert not list((tmp_path / "root").rglob("sa_*.json"))


def reshard(*arguments):
    tool = Path(__file__).parents[2] / "tools" / "reshard.py"
    return processes.run(
        [sys.executable, tool, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )


def test_the_command_goes_on_after_a_damaged_source_and_says_what_became_of_each(tmp_path):

    for number, ids in enumerate((GOOD, range(200, 210), range(300, 310))):
        tiny.make_tar(tmp_path / f"sa_00002{number}.tar", ids)
    cut = tmp_path / "sa_000021.tar"
    cut.write_bytes(cut.read_bytes()[:-3000])
    good = hashlib.md5((tmp_path / "sa_000020.tar").read_bytes()).hexdigest()
    checklist = tmp_path / "md5.txt"
    checklist.write_text(f"{good}  sa_000020.tar\n{'0' * 32}  sa_000022.tar\n")
    done = reshard(tmp_path, "--out", tmp_path / "root", "--md5", checklist)
    assert done.returncode == 1
    assert "sa_000021.tar is not in" in done.stderr
    assert "md5 is not checked" in done.stderr
    assert f"FAILED sa_000022: {tmp_path / 'sa_000022.tar'}: md5 is" in done.stdout
    assert "damage in sa_000021" in done.stdout
    assert "gzip stream is truncated" in done.stdout
    assert "Partial: " in done.stdout
    assert "1 failed (sa_000022)" in done.stdout
    dataset = sa1b.open(tmp_path / "root")
    assert sorted(dataset.manifest["sources"]) == ["sa_000020", "sa_000021"]
    assert set(dataset.failed) == {"sa_000022"}


def test_two_md5_of_one_name_are_refused(tmp_path):
    tar, path = tiny.write_tar(tmp_path / "sa_1.tar", pairs([1])), tmp_path / "md5.txt"
    right = hashlib.md5(tar.read_bytes()).hexdigest()
    path.write_text(f"{right}  a/sa_1.tar\n{'1' * 32}  b/sa_1.tar\n")
    with pytest.raises(SourceError, match=rf"line 2: sa_1\.tar .* 1{{32}}, and {right} on an earlier line"):
        sa1b.reshard(tar, tmp_path / "root", md5=path, quiet=True)
    path.write_text(f"{right}  a/sa_1.tar\n{right}  b/sa_1.tar\n")
    assert sa1b.reshard(tar, tmp_path / "root", md5=path, quiet=True).exit_code == 0


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("flag", ["--recheck", "--no-space-check"])
def test_the_md5_of_a_finished_source_is_checked_when_it_is_read_again(tmp_path, flag, known):
    tar = tmp_path / "sa_000020.tar"
    tiny.make_tar(tar, [1, 2])
    right, checklist = hashlib.md5(tar.read_bytes()).hexdigest(), tmp_path / "md5.txt"
    checklist.write_text(f"{right}  sa_000020.tar\n")
    assert reshard(tar, "--out", tmp_path / "root", *(["--md5", checklist] if known else [])).returncode == 0
    os.utime(tar, (1, 1))
    checklist.write_text(f"{'0' * 32}  sa_000020.tar\n")
    done = reshard(tar, "--out", tmp_path / "root", "--md5", checklist, flag)
    assert done.returncode == 1
    assert f"its md5 is {right} and the checklist has {'0' * 32}" in done.stdout
