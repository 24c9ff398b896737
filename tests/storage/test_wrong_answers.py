"""What a store answers wrongly: the right bytes, or the documented error with the URL, within the deadline."""

import json
import shutil
import sys
import tarfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

import sa1b
from sa1b.storage.errors import DeniedError, MissingError, ReplacedError, StorageError, UnavailableError
from tests import processes
from tests.kit import Done, files, flip, run
from tests.shards.tiny_source import pairs, two_sources, write_source
from tests.storage.store_server import StoreServer

EVER = float("inf")
REPOSITORY = Path(__file__).parents[2]
SHARD = "*/sa1b-*.tar"
WAYS = ["stream", "loader", "cache"]


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    return two_sources(tmp_path_factory.mktemp("tars"))


@pytest.fixture(scope="module")
def made(tars, tmp_path_factory):
    """Five shards of 19 images in two sources."""
    root = tmp_path_factory.mktemp("made") / "root"
    sa1b.reshard(tars, root, images_per_shard=5, workers=1, quiet=True)
    return root


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Shards with the same names and image ids, and other images."""
    folder = tmp_path_factory.mktemp("other")
    tars = [
        write_source(folder / "sa_000001.tar", pairs([*range(100, 109), *range(200, 207)], seed=7)),
        write_source(folder / "sa_000002.tar", pairs(range(300, 303), seed=8)),
    ]
    sa1b.reshard(tars, folder / "root", images_per_shard=5, workers=1, quiet=True)
    return folder / "root"


@pytest.fixture
def store(tmp_path, monkeypatch):
    for name, value in {"AWS_ACCESS_KEY_ID": "KEY", "AWS_SECRET_ACCESS_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tables"))
    with StoreServer() as running:
        yield running


# Streams


def stream_of(root, tmp_path, **options):
    options = {"global_batch": 4, "image_size": 32, "masks": 2, "deadline": 60, **options}
    return sa1b.Stream(root, damage_log=tmp_path / "damage.jsonl", **options)


def of_store(store, tmp_path, way="stream", **options):
    if way == "cache":
        options = {"cache": tmp_path / "cache", "cache_bytes": 10**9, **options}
    return stream_of(store.root, tmp_path, storage_options=store.options, **options)


def batches(stream, way="stream"):
    """Ids and digest of all batches of the next epoch."""
    source = sa1b.Loader(stream, threads=2, quiet=True) if way == "loader" else stream
    return [
        (batch.ids.tolist(), sha256(b"".join(map(bytes_of, tensors(batch)))).hexdigest()) for batch in source
    ]


def tensors(batch):
    return batch.images, batch.masks.runs, batch.masks.offsets, batch.points, batch.mask_ids, batch.valid


def bytes_of(tensor):
    return tensor.numpy().tobytes()


@pytest.fixture(scope="module")
def expected(made, tmp_path_factory):
    """Two epochs."""
    stream = stream_of(made, tmp_path_factory.mktemp("expected"))
    return [batches(stream), batches(stream)]


PASSING = ["500", "503", "429", "short", "longer", "shifted", "cut", "reset", "flipped", "noise", "slow"]
CASES = [
    *((kind, SHARD, way) for kind in PASSING for way in WAYS),
    *((kind, key, "stream") for kind in PASSING for key in ("*/dataset.json", "*/samples-*.bin")),
]


@pytest.mark.parametrize(("kind", "key", "way"), CASES)
def test_a_wrong_answer_that_passes_changes_no_batch(made, store, tmp_path, expected, kind, key, way):
    store.load(made)
    fault = store.fault(kind, "GET", key, times=2 if key == SHARD else 1)
    stream = of_store(store, tmp_path, way)
    assert batches(stream, way) == expected[0]
    assert fault.hits == fault.times
    assert not (tmp_path / "damage.jsonl").exists()
    if way == "cache":
        before = len(store.log)
        assert batches(stream) == expected[1]
        assert len(store.log) == before


WRONG = [  # of the answers to reads of shards from the k-th one on
    ("whole", 1, StorageError, r"[\d,]+ bytes received, the server ignores byte ranges"),
    ("error in 200", 1, StorageError, "received"),
    ("404", 2, MissingError, "the shard is missing; copy it again"),
    ("403", 2, DeniedError, "access denied .*AWS_ACCESS_KEY_ID"),
    ("412", 1, StorageError, "PreconditionFailed"),
    ("416", 1, StorageError, "0 bytes, 20,480 listed in dataset.json; copy it again"),
    ("redirect", 1, StorageError, "the request was refused .TemporaryRedirect"),
    ("retagged", 1, ReplacedError, r"replaced since its first read \(ETag .*; open the dataset again"),
    ("replaced", 1, ReplacedError, "replaced since the dataset was opened; open it again"),
    ("replaced", 12, ReplacedError, "replaced since"),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("kind", "at", "error", "message"), WRONG)
def test_a_wrong_answer_that_stays_stops_the_stream_with_the_url(
    made, other, store, tmp_path, kind, at, error, message, way
):
    store.load(made)
    store.next = {f"{store.prefix}/{name}": data for name, data in files(other).items()}
    fault = store.fault(kind, "GET", SHARD, at=at, times=1 if kind == "replaced" else EVER)
    assert_stops(of_store(store, tmp_path, way), way, store.root, error, message)
    assert fault.hits
    assert not (tmp_path / "damage.jsonl").exists()


def assert_stops(stream, way, root, error, message):
    """The error names a shard; it is of this class and of none below it."""
    with pytest.raises(error, match=rf"^{root}/sa1b-\d+-\d+\.tar\b.*{message}") as caught:
        batches(stream, way)
    assert type(caught.value) is error


UNTIL = ["500", "503", "short", "longer", "shifted", "cut", "reset", "noise", "hang"]


@pytest.mark.parametrize(
    ("kind", "way"),
    [(kind, way) for way in WAYS for kind in (UNTIL if way == "stream" else ["503", "noise", "hang"])],
)
def test_a_store_that_answers_wrongly_until_the_deadline_is_unavailable_and_nothing_is_damaged(
    made, store, tmp_path, kind, way
):
    store.load(made)
    stream = None
    while stream is None:  # a busy machine may read dataset.json after the deadline
        with suppress(UnavailableError):
            stream = of_store(store, tmp_path, way, deadline=0.5)
    fault = store.fault(kind, "GET", SHARD, times=EVER)
    with pytest.raises(
        UnavailableError, match=rf"^{store.root}/sa1b-\d+-\d+\.tar, bytes .* in 0\.5 s; last: "
    ) as caught:
        batches(stream, way)
    assert f"last: {caught.value.last_error}; " in str(caught.value)
    assert caught.value.last_error
    assert fault.hits
    assert not (tmp_path / "damage.jsonl").exists()


@pytest.mark.parametrize("way", WAYS)
def test_equal_wrong_bytes_in_two_reads_are_damage_with_the_log_and_the_substitutes_of_a_folder(
    made, store, tmp_path, way
):
    store.load(made)
    damaged = shutil.copytree(made, tmp_path / "damaged")
    for sample in sa1b.open(made):
        if sample.shard == "sa1b-000002-0000.tar":
            flip(damaged, sample.shard, sample.offset + 5)
    store.fault("flipped", "GET", "*/sa1b-000002-0000.tar", times=EVER)

    def found(stream, way, name):
        (tmp_path / "damage.jsonl").unlink(missing_ok=True)
        epochs = [batches(stream, way) for _ in range(2)]
        lines = (tmp_path / "damage.jsonl").read_text().splitlines()
        seen = [{**json.loads(line), "reason": name in line} for line in lines]
        return epochs, sorted(seen, key=lambda one: one["position"])

    of_folder = found(stream_of(damaged, tmp_path, global_batch=1), way, "damaged: ")
    assert found(of_store(store, tmp_path, way, global_batch=1), way, f"damaged: {store.root}") == of_folder
    ids = {image_id for epoch in of_folder[0] for batch in epoch for image_id in batch[0]}
    assert (len(ids), ids & {300, 301, 302}) == (16, set())
    assert {one["image_id"] for one in of_folder[1]} == {300, 301, 302}


@pytest.mark.parametrize("block_size", [1, 2])
def test_a_rank_reads_its_samples_once_and_the_second_epoch_of_a_cache_nothing(
    made, store, tmp_path, block_size
):
    store.load(made)
    spans = {}
    for path in made.glob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                image_id = int(Path(member.name).stem.partition("_")[2].partition(".")[0])
                end = -(-(member.offset_data + member.size) // 512) * 512
                spans.setdefault(image_id, set()).update((path.name, at) for at in range(member.offset, end))
    ids = {}
    for rank in range(2):
        stream = of_store(store, tmp_path, global_batch=4, block_size=block_size, rank=rank, world_size=2)
        store.log.clear()
        ids[rank] = [one for batch in stream for one in batch.ids.tolist()]
        own = set.union(*map(spans.get, ids[rank]))
        for one in store.log:
            shard, ends = one.key.rpartition("/")[2], one.range.removeprefix("bytes=").split("-")
            assert {(shard, int(at)) for at in ends} <= own
            assert one.sent == int(ends[1]) + 1 - int(ends[0])
        assert len(own) / 2 < sum(one.sent for one in store.log) < 1.2 * len(own)  # with a gap between two
    assert sorted(ids[0] + ids[1]) == sorted(spans)
    stream = of_store(store, tmp_path, "cache")
    list(stream)
    store.log.clear()
    list(stream)
    assert store.log == []


# Commands


def command(verb, tars, made, store, tmp_path):
    """The words of a command, and what it has made so far."""
    words = {
        "copy to": ("copy", made, store.root),
        "copy from": ("copy", store.root, tmp_path / "back"),
        "reshard": ("reshard", *tars, "--out", store.root, "--images-per-shard", 5),
    }[verb]
    more = ("--workers", 1, "--endpoint", store.url, "--scratch", tmp_path / "scratch")
    return (*words, *more), store.files if verb != "copy from" else lambda: files(tmp_path / "back")


def ended(words):
    """A command in a process of its own: workers have its variables, and it knows nothing of earlier ones."""
    line = [sys.executable, "-m", "sa1b", *map(str, words)]
    done = processes.run(line, capture_output=True, text=True, cwd=REPOSITORY)
    return Done(done.returncode, done.stdout, done.stderr)


def ended_first(words):
    return ended(words) if words[0] == "reshard" else run(*words, code=None)


RETRIED = ["500", "503", "reset", "slow"]
DONE = ["done 500", "done reset"]
READS = [*RETRIED, "whole", "cut", "short", "longer", "shifted", "flipped", "noise"]
CHANGES = [  # verb, request, object, faults that are retried
    *(("copy from", "GET", key, READS) for key in (SHARD, "*/sa1b-*.parquet")),
    *(
        ("copy from", "GET", key, [*RETRIED, "cut", "flipped"])
        for key in ("*/dataset.json", "*/tasks/*.json")
    ),
    ("copy from", "LIST", "*", [*RETRIED, "cut"]),
    ("copy from", "HEAD", SHARD, RETRIED),
    *(
        (verb, what, key, [*RETRIED, *DONE] if verb == "copy to" else ["503", "done 500"])
        for verb in ("copy to", "reshard")
        for what, key in (
            ("PUT", SHARD),
            ("PUT", "*/tasks/*.json"),
            ("PUT", "*/dataset.json"),
            ("CREATE", "*/tasks/*.claim"),
            ("REPLACE", "*/tasks/*.claim"),
            ("DELETE", "*/tasks/*.claim"),
        )
    ),
    *(("copy to", "PUT", key, ["misstored"]) for key in ("*/tasks/*.json", "*/dataset.json")),
    *((verb, "LIST", "*", ["500", "cut", "stale"]) for verb in ("copy to", "reshard")),
]


@pytest.mark.parametrize(
    ("verb", "what", "key", "kind"), [(*one[:3], kind) for one in CHANGES for kind in one[3]]
)
def test_a_wrong_answer_that_passes_changes_no_byte_of_a_command(
    tars, made, store, tmp_path, verb, what, key, kind
):
    if verb == "copy from":
        store.load(made)
    fault = store.fault(kind, what, key)
    words, found = command(verb, tars, made, store, tmp_path)
    done = ended_first(words)
    assert done.code == 0, done.err
    assert fault.hits == 1
    assert found() == files(made)
    assert [key for key in store.objects if ".claim" in key] == []


STOPS = [
    ("copy from", "GET", SHARD, "403", "access denied"),
    ("copy from", "GET", SHARD, "retagged", "replaced since its first read"),
    ("copy from", "GET", "*/dataset.json", "403", "access denied"),
    ("copy from", "GET", "*/dataset.json", "404", "dataset.json"),
    ("copy from", "LIST", "*", "403", "access denied"),
    *(
        (verb, what, key, kind, cause)
        for verb in ("copy to", "reshard")
        for what, key, kind, cause in (
            ("PUT", SHARD, "403", "access denied"),
            ("PUT", "*/tasks/*.json", "403", "access denied"),
            ("PUT", "*/dataset.json", "403", "access denied"),
            ("PUT", SHARD, "lost", "sa1b-00000"),
            ("PUT", SHARD, "misstored", "differs from"),
            ("CREATE", "*", "403", "access denied"),
            ("CREATE", "*", "unconditional", "ignores the condition of a write"),
            ("LIST", "*", "403", "access denied"),
        )
    ),
]


@pytest.mark.parametrize(("verb", "what", "key", "kind", "cause"), STOPS)
def test_a_command_that_is_stopped_by_a_wrong_answer_says_so_and_is_completed_by_the_next(
    tars, made, store, tmp_path, verb, what, key, kind, cause
):
    if verb == "copy from":
        store.load(made)
    fault = store.fault(kind, what, key, times=EVER)
    assert_is_stopped_and_completed(*command(verb, tars, made, store, tmp_path), made, store, fault, cause)


def assert_is_stopped_and_completed(words, found, made, store, fault, cause):
    done = ended_first(words)
    assert done.code in (1, 2)
    assert fault.hits
    assert cause in done.out + done.err
    assert f"{store.root}" in done.out + done.err
    assert "Traceback" not in done.err
    assert store.uploads == {}
    store.faults.clear()
    done = ended(words)
    assert done.code == 0, done.err
    assert found() == files(made)


@pytest.mark.parametrize("verb", ["copy to", "reshard"])
def test_shards_are_stored_before_their_task_and_the_dataset_last(tars, made, store, tmp_path, verb):
    assert ended_first(command(verb, tars, made, store, tmp_path)[0]).code == 0
    names = [one.key.removeprefix(f"{store.prefix}/") for one in store.asked("PUT CREATE COMPLETE")]
    names = [name for name in names if "claim" not in name and not name.startswith(".")]
    assert sorted(names) == sorted(files(made))
    for source in ("000001", "000002"):
        task = names.index(f"tasks/sa_{source}.json")
        before = [name for name in names if source in name and name != names[task]]
        assert max(map(names.index, before)) < task < len(names) - 2
    assert names[-2].startswith("samples-")
    assert names[-1] == "dataset.json"


def test_two_processes_share_the_sources_though_conditional_writes_are_slow(tars, made, store, tmp_path):
    for what in ("CREATE", "REPLACE"):
        store.fault("slow", what, times=EVER)
    both = []
    for number in range(2):
        words, _ = command("reshard", tars, made, store, tmp_path / str(number))
        line = [sys.executable, "-m", "sa1b", *map(str, words)]
        both.append(processes.Process(line, cwd=REPOSITORY))
    assert [one.wait(300) for one in both] == [0, 0]
    assert store.files() == files(made)
    written = [one.key for one in store.asked("PUT", "*/tasks/*.json") + store.asked("PUT", SHARD)]
    assert len(written) == len(set(written)) == 7
    created = [one for one in store.asked("CREATE", "*/tasks/*.claim") if one.status == 200]
    assert {one.key[-15:] for one in created} == {"sa_000001.claim", "sa_000002.claim"}


def test_a_bucket_of_the_same_name_at_another_endpoint_is_another_one(made, other, store, tmp_path):
    with StoreServer() as second:
        second.prefix = store.prefix
        for server, root in ((store, made), (second, other)):
            server.load(root)
            run("copy", store.root, tmp_path / server.url[-5:], "--endpoint", server.url)
            assert files(tmp_path / server.url[-5:]) == files(root)


# Uploads in parts


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A source whose shard has more than 16 MiB: comments in a JPEG, which are stored with it."""
    folder = tmp_path_factory.mktemp("large")
    content = pairs(range(2))
    jpeg, document = content[1]
    comment = b"\xff\xfe\xff\xff" + bytes(range(1, 254)) * 258 + bytes(259)
    assert len(comment) == 65537
    content[1] = jpeg[:2] + comment * 280 + jpeg[2:], document
    tar = write_source(folder / "sa_000001.tar", content)
    sa1b.reshard(tar, folder / "root", workers=1, quiet=True)
    return tar, folder / "root"


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        *(("BEGIN", kind) for kind in ("500", "done 500", "done reset")),
        *(("PART", kind) for kind in ("503", "done 500", "done reset")),
        *(("COMPLETE", kind) for kind in ("500", "error in 200", "done 500", "done reset")),
        *(("ABORT", kind) for kind in ("500",)),
    ],
)
def test_an_upload_in_parts_of_which_a_request_fails_is_complete_and_leaves_none(
    large, store, tmp_path, what, kind
):
    fault = store.fault(kind, what)
    run("copy", large[1], store.root, "--endpoint", store.url, "--scratch", tmp_path)
    assert fault.hits == 1
    assert store.files() == files(large[1])
    assert store.uploads == {}


def test_reshard_into_a_bucket_with_more_sources_than_a_list_has_on_a_page_is_resumed(store, tmp_path):
    store.page = 2
    ids = {f"sa_00000{i}": [10 * i, 10 * i + 1] for i in range(1, 8)}
    tars = [write_source(tmp_path / f"{name}.tar", pairs(some)) for name, some in ids.items()]
    sa1b.reshard(tars, tmp_path / "whole", images_per_shard=5, workers=1, quiet=True)
    words, found = command("reshard", tars, None, store, tmp_path)
    store.fault("403", "PUT", "*/tasks/sa_000006.json", times=EVER)
    assert ended(words).code == 1
    tasks = [name[6:15] for name in found() if name.startswith("tasks/") and name.endswith(".json")]
    assert len(tasks) > 2 * store.page
    store.faults.clear()
    store.log.clear()
    done = ended((*words, "--json"))
    assert (done.code, sorted(done.json["skipped"])) == (0, sorted(tasks))
    assert sorted(done.json["done"]) == sorted(ids.keys() - {*tasks})
    written = {one.key[-14:-9] for one in store.asked("PUT CREATE COMPLETE", SHARD)}
    assert written == {name[-5:] for name in ids.keys() - {*tasks}}
    assert found() == files(tmp_path / "whole")
