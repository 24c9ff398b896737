"""Copies of dataset directories: the same bytes, verified, resumed, never of another dataset."""

import contextlib
import json
import shutil
import threading
from dataclasses import replace

import pytest

from sa1b.console import command
from sa1b.errors import ManifestError, Sa1bError, UsageError
from sa1b.ingest.finish import drop_source
from sa1b.ingest.policy import IngestRun, Policy
from sa1b.ingest.reshard import reshard
from sa1b.programs.transfer import dataset_copy
from sa1b.shards import manifest
from sa1b.shards.commit import write_dataset
from sa1b.shards.dataset import Dataset
from sa1b.shards.layer_writer import drop
from sa1b.shards.manifest import read_task, read_tasks
from sa1b.storage.claim import Claim
from sa1b.storage.open import open_store
from sa1b.storage.store import FolderStore
from sa1b.stream.dataset import Stream
from sa1b.verify.verify import verify
from sa1b.views.view import copy_view, images_of
from tests.shards.tiny_source import ROOTS, add_layer, make_root, pairs, write_source
from tests.transfer.copying import content, copied, damage

SHARD = "sa1b-000001-0001.tar"
KINDS = ("folder", "bucket")
SAME = [pytest.param(kind, kind, marks=pytest.mark.slow) for kind in KINDS]
LATER = [pytest.param(step, kind, marks=pytest.mark.slow) for step, kind in zip((4, 1), KINDS, strict=True)]


@pytest.fixture
def source(request, root, bucket):
    """The dataset directory as a folder or as a bucket."""
    if request.param == "folder":
        return FolderStore(root)
    found = bucket()
    copied(root, found)
    return found


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_a_copy_has_the_same_bytes(source, target):
    summary = copied(source, target)
    assert content(target) == content(source)
    assert summary.exit_code() == 0
    assert (summary.sources, summary.shards, summary.skipped) == (2, 5, [])
    assert f"Complete: {target.url('dataset.json')}" in summary.table()
    again = copied(source, target)
    assert (again.skipped, again.bytes_copied, again.views) == (["sa_000001", "sa_000002"], 0, [])
    assert content(target) == content(source)


def test_a_copy_is_clean_and_can_be_read(root, target):
    copied(root, target, workers=2)
    report = verify(target, deep=True, workers=0, quiet=True)
    assert (report.findings, report.notes) == ([], verify(root, workers=0, quiet=True).notes)


def test_nothing_is_left_in_the_scratch_folder(root, bucket):
    store = bucket()
    copied(root, store)
    copied(store, FolderStore(root.parent / "back"))
    assert [path for path in store.scratch.rglob("*") if path.is_file()] == []
    assert content(FolderStore(root.parent / "back")) == content(FolderStore(root))


class Stopped(BaseException):
    pass


def stop_after(monkeypatch, method, count):
    """Let a method of the copy raise an exception in its call number `count`, before or after its work."""
    left = iter(range(count))
    original = getattr(dataset_copy._Copy, method)

    def counted(self, *arguments):
        if next(left, None) is None:
            raise Stopped
        return original(self, *arguments)

    monkeypatch.setattr(dataset_copy._Copy, method, counted)


@pytest.mark.parametrize(
    ("method", "count"),
    [*(("_object", count) for count in range(0, 10, 3)), ("_finish", 1), ("views", 0), ("dataset", 0)],
)
def test_an_interrupted_copy_can_be_resumed_and_read_before(root, target, monkeypatch, method, count):
    with monkeypatch.context() as context:
        stop_after(context, method, count)
        with pytest.raises(Stopped):
            copied(root, target)
    assert not target.exists("dataset.json")
    assert target.names("tasks", ".claim") == []
    before = content(target)
    summary = copied(root, target)
    assert content(target) == content(FolderStore(root))
    assert summary.skipped == sorted(
        name[6:-5] for name in before if name.startswith("tasks/") and name.endswith(".json")
    )
    kept = {name: data for name, data in before.items() if name.startswith("sa1b-")}
    tasks = read_tasks(root)
    finished = {shard.name[:-4] for name in summary.skipped for shard in tasks[name].shards}
    assert summary.bytes_kept == sum(
        len(data) for name, data in kept.items() if name.rpartition(".")[0] not in finished
    )


def test_a_wrong_object_of_the_right_size_is_replaced(root, target):
    """Left by another version: only the digest shows that it is wrong."""
    whole = (root / SHARD).read_bytes()
    target.put(SHARD, whole[:512] + b"\0" * (len(whole) - 512))
    target.put("sa1b-000001-0000.tar", (root / "sa1b-000001-0000.tar").read_bytes()[:600])
    copied(root, target)
    assert content(target) == content(FolderStore(root))


def test_a_lost_shard_of_a_finished_source_is_copied_again(root, target):
    copied(root, target)
    target.remove(SHARD)
    summary = copied(root, target)
    assert summary.skipped == ["sa_000002"]
    assert content(target) == content(FolderStore(root))


@pytest.mark.parametrize(("source", "target"), [*zip(KINDS, KINDS[::-1], strict=True), *SAME], indirect=True)
@pytest.mark.parametrize(
    ("name", "repair"),
    [
        (
            SHARD,
            "restore it from a copy, or run `{reshard}` again with the source, --out {root} and --redo sa_000001",
        ),
        ("sa1b-000001-0001.parquet", "run `{index} {root}/" + SHARD + "`"),
    ],
)
@pytest.mark.parametrize("how", ["flipped", "missing", "short"])
def test_a_damaged_source_is_left_out_with_its_repair(source, target, name, repair, how, root):
    sound = content(source)
    if how == "flipped":
        damage(source, name, 500)
    elif how == "missing":
        source.remove(name)
    else:
        source.put(name, source.read(name)[:-100])
    summary = copied(source, target)
    assert summary.exit_code() == 1
    why = summary.failed["sa_000001"]
    assert why.startswith(source.url(name))
    assert repair.format(reshard=command("reshard"), index=command("index"), root=source.root) in why
    assert f"FAILED sa_000001: {why}" in summary.table()
    document = manifest.read_dataset(target)
    assert list(document["sources"]) == ["sa_000002"]
    assert document["failed"] == {"sa_000001": why}
    assert verify(target, workers=0, quiet=True).findings == []
    source.put(name, sound[name])
    again = copied(source, target)
    assert (again.exit_code(), again.skipped) == (0, ["sa_000002"])
    assert again.bytes_kept > 0
    assert content(target) == sound


def test_damage_in_transit_is_read_again(root, bucket, monkeypatch, tmp_path):
    store = bucket()
    copied(root, store)
    damaged = []
    original = dataset_copy.fetch

    def fetch(reader, name, expected, file, progress=None):
        read = reader.read_ranges

        def flipped(ranges, **options):
            for data in read(ranges, **options):
                damaged.append(name)
                yield b"\xff" + data[1:]

        reader.read_ranges = flipped
        try:
            original(reader, name, expected, file, progress)
        finally:
            del reader.read_ranges

    monkeypatch.setattr(dataset_copy, "fetch", fetch)
    summary = copied(store, tmp_path / "back")
    assert (len(damaged), summary.failed) == (10, {})
    assert content(FolderStore(tmp_path / "back")) == content(FolderStore(root))


@pytest.mark.parametrize(("step", "target"), [*zip((1, 4), KINDS, strict=True), *LATER], indirect=["target"])
@pytest.mark.parametrize("change", ["replace", "drop", "add"])
def test_a_source_that_changes_during_its_copy_is_copied_by_the_next(
    root, target, tmp_path, monkeypatch, step, change
):
    """The first copy is an old version, a new one, or says what failed; never a mixture that is called complete."""
    calls, copy_object = [], dataset_copy._Copy._object

    def changed(copy, *arguments):
        calls.append(arguments)
        if len(calls) == step + 1:
            if change == "drop":
                drop_source(root, "sa_000001")
            else:
                number = 1 if change == "replace" else 3
                tar = write_source(tmp_path / f"sa_00000{number}.tar", pairs(range(900, 912), seed=9))
                reshard(
                    (tar,), root, ROOTS["plain"], Policy(), IngestRun(workers=1, quiet=True, replace=True)
                )
        return copy_object(copy, *arguments)

    monkeypatch.setattr(dataset_copy._Copy, "_object", changed)
    with contextlib.suppress(Sa1bError):
        summary = copied(root, target)
        if summary.exit_code() == 0:
            assert verify(target, workers=0, quiet=True).exit_code() == 0
    assert len(calls) > step
    monkeypatch.undo()
    if change != "add":  # the advice of the copy
        with contextlib.suppress(UsageError):
            drop_source(target, "sa_000001")
    assert copied(root, target).exit_code() == 0
    assert images(target.root) == images(root)
    assert verify(target, workers=0, quiet=True).exit_code() == 0


def images(root):
    return [(sample.image_id, sample.jpeg) for sample in Dataset(root)]


def test_a_source_that_was_added_is_added_to_the_copy(root, target, tmp_path):
    new = write_source(tmp_path / "sa_000003.tar", pairs(range(900, 905)))
    copied(root, target)
    run = IngestRun(workers=1, quiet=True, space_check=False)
    reshard((new,), root, ROOTS["plain"], Policy(False, frozenset(), None, None), run)
    summary = copied(root, target)
    assert summary.skipped == ["sa_000001", "sa_000002"]
    assert content(target) == content(FolderStore(root))


def test_failed_and_pending_sources_are_those_of_the_original(root, target):
    tasks = read_tasks(root)
    FolderStore(root).put("tasks/sa_000008.failed", b'{"error": "SourceError", "message": "truncated"}\n')
    write_dataset(root, tasks, {"sa_000008": "truncated"}, ["sa_000009"])
    summary = copied(root, target)
    assert summary.exit_code() == 0
    assert "2 sources failed or pending (sa_000008, sa_000009)" in summary.table()
    assert content(target) == content(FolderStore(root))


def test_another_dataset_is_refused(root, target, tmp_path):
    other = write_source(tmp_path / "sa_000007.tar", pairs(range(700, 704)))
    copied(make_root(tmp_path / "other", [other], ROOTS["plain"]), target)
    before = content(target)
    with pytest.raises(UsageError, match=r"is another dataset: .* has no sa_000007; choose another DEST"):
        copied(root, target)
    assert content(target) == before


@pytest.mark.parametrize("options", ["plain", "keep_json"])
def test_a_source_of_the_same_name_with_other_bytes_is_refused(root, target, tmp_path, options):
    other = write_source(tmp_path / "sa_000001.tar", pairs(range(700, 704)))
    copied(make_root(tmp_path / "other", [other], ROOTS[options]), target)
    before = content(target)
    with pytest.raises(UsageError, match=rf"has sa_000001 with .*--out {target.root} --drop sa_000001"):
        copied(root, target)
    assert content(target) == before


def test_a_copy_to_itself_or_into_itself_or_to_a_file_is_refused(root):
    for dest in (root, root / "inner", f"{root}/", root / "dataset.json"):
        with pytest.raises(UsageError, match="DEST"):
            copied(root, dest)


def test_a_directory_without_a_dataset_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError, match="no dataset there"):
        copied(tmp_path / "empty", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("lost", [True, False])
def test_a_wrong_task_file_is_refused(root, target, lost):
    path = root / "tasks" / "sa_000001.json"
    if lost:
        path.unlink()
    else:
        task = read_task(root, "sa_000001")
        manifest.write_task(root, replace(task, counts={**task.counts, "members": 1}))
    with pytest.raises(ManifestError, match=r"sa_000001.json: not (there|the one)"):
        copied(root, target)


def test_a_destination_with_other_files_is_refused(root, target):
    target.put("notes.txt", b"mine")
    with pytest.raises(UsageError, match=r"contains 'notes.txt', which is no part of a dataset directory"):
        copied(root, target)
    assert target.names("") == ["notes.txt"]


def test_too_little_space_is_refused(root, target, monkeypatch):
    largest = max(path.stat().st_size for path in root.glob("*.tar"))
    usage = type("Usage", (), {"free": largest - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match="MB free, .* needed.*; name a larger disk"):
        copied(root, target)
    assert target.names("tasks") == []


def test_a_source_that_another_process_writes_is_left_to_it(root, target):
    """The claim is that of reshard, so that neither command writes into the other's source."""
    claim = Claim.take(target, "tasks/sa_000001.claim")
    assert claim is not None
    with claim:
        summary = copied(root, target)
    assert "is writing this source" in summary.failed["sa_000001"]
    assert manifest.read_dataset(target)["pending"] == ["sa_000001"]
    assert copied(root, target).exit_code() == 0
    assert content(target) == content(FolderStore(root))


def test_an_error_of_the_destination_ends_the_copy_and_keeps_what_was_copied(root, tmp_path, monkeypatch):
    target = FolderStore(tmp_path / "copy")
    original = FolderStore.commit_file

    def full(self, staged, name, progress=None):
        if name == "sa1b-000002-0000.tar":
            raise OSError(28, "No space left on device", self.url(name))
        original(self, staged, name, progress)

    with monkeypatch.context() as context:
        context.setattr(FolderStore, "commit_file", full)
        with pytest.raises(OSError, match="sa1b-000002-0000.tar"):
            copied(root, target)
    assert target.names("tasks", ".json") == ["sa_000001.json"]
    assert copied(root, target).skipped == ["sa_000001"]
    assert content(target) == content(FolderStore(root))


def test_an_interruption_ends_all_threads(root, target, monkeypatch):
    started = threading.Event()
    original = dataset_copy._Copy._object

    def slow(self, *arguments):
        started.set()
        self._stop.wait(60)
        original(self, *arguments)

    monkeypatch.setattr(dataset_copy._Copy, "_object", slow)
    monkeypatch.setattr(
        dataset_copy, "as_completed", lambda _: started.wait() and (_ for _ in ()).throw(Stopped)
    )
    with pytest.raises(Stopped):
        copied(root, target, workers=2)
    assert [one for one in threading.enumerate() if one.name.startswith("copy")] == []
    assert target.names("tasks") == []
    monkeypatch.undo()
    copied(root, target)
    assert content(target) == content(FolderStore(root))


class TestShards:
    """--shards and --view: some of the shards."""

    def test_the_matching_shards_are_a_dataset(self, root, target):
        summary = copied(root, target, shards=["sa1b-000001-*1*", "sa1b-000002-0000.tar"])
        assert summary.partial == ["sa_000001"]
        assert target.names("", ".tar") == [SHARD, "sa1b-000002-0000.tar"]
        report = verify(target, deep=True, workers=0, quiet=True)
        assert (report.findings, report.shards) == ([], 2)
        task = read_task(target, "sa_000001")
        assert task.source["sha256"] is None
        assert [shard.name for shard in task.shards] == [SHARD]
        assert read_task(target, "sa_000002") == read_task(root, "sa_000002")

    def test_the_counts_are_those_of_the_shards(self, root, tmp_path):
        copied(root, tmp_path / "copy", shards=[SHARD])
        dataset = Dataset(tmp_path / "copy")
        samples = list(dataset)
        task = read_task(tmp_path / "copy", "sa_000001")
        assert task.counts["images"] == len(samples)
        assert task.counts["masks"] == sum(len(one.annotations) for one in samples)
        assert task.counts["jpg_bytes"] == sum(len(one.jpeg) for one in samples)
        assert task.largest["rle_bytes"] == max(len(one.annotations.rle) for one in samples)
        assert task.largest["runs"] == max(len(one.annotations.runs().runs) for one in samples)
        assert task.largest["masks"] == max(len(one.annotations) for one in samples)
        assert task.largest["jpg_bytes"] == max(len(one.jpeg) for one in samples)

    def test_it_can_be_streamed(self, root, tmp_path):
        copied(root, tmp_path / "copy", shards=["*-0000", "*-0001"])
        stream = Stream(tmp_path / "copy", global_batch=2, image_size=32, masks=2)
        whole = {sample.image_id: sample.jpeg for sample in Dataset(root)}
        part = {sample.image_id: sample.jpeg for sample in Dataset(tmp_path / "copy")}
        assert len(stream) > 0
        assert part.items() < whole.items()

    def test_reshard_does_not_take_a_part_for_a_finished_source(self, root, tmp_path, sources):
        copy = tmp_path / "copy"
        copied(root, copy, shards=[SHARD, "sa1b-000002-*"])
        policy = Policy(False, frozenset(), None, None)
        run = IngestRun(workers=1, quiet=True, space_check=False)
        summary = reshard(sources[:1], copy, ROOTS["plain"], policy, run)
        assert list(summary.done) == ["sa_000001"]
        assert verify(copy, deep=True, workers=0, quiet=True).findings == []
        assert Dataset(copy).table.ids_digest == Dataset(root).table.ids_digest

    def test_more_shards_are_added_until_the_copy_is_whole(self, root, target):
        copied(root, target, shards=[SHARD])
        copied(root, target, shards=["sa1b-000001-0000.tar"])
        assert target.names("", ".tar") == ["sa1b-000001-0000.tar", SHARD]
        assert verify(target, deep=True, workers=0, quiet=True).findings == []
        assert copied(root, target, shards=[SHARD]).skipped == ["sa_000001"]
        copied(root, target)
        assert content(target) == content(FolderStore(root))

    def test_a_pattern_without_a_match_is_refused(self, root, tmp_path):
        with pytest.raises(
            UsageError, match=r"--shards sa1b-9\*: no shard of .* matches.*sa1b-000001-0000.tar"
        ):
            copied(root, tmp_path / "copy", shards=["sa1b-9*"])
        assert not (tmp_path / "copy").exists()

    @pytest.mark.parametrize("layers", [(), ("round2",)])
    def test_the_shards_of_a_view_are_copied_with_it(self, root, target, layers):
        summary = copied(root, target, images=images_of(str(root), "two")[0], layers=layers)
        assert target.folders("layers") == [*layers]
        digest = copy_view(str(root), target.root, "two")
        assert (summary.sources, summary.shards) == (1, 1)
        assert target.names("views") == [f"{digest}.ids", f"{digest}.json", f"{digest}.rows"]
        report = verify(target, deep=True, workers=0, quiet=True)
        notes = [f"layer {name} has 2 images that the directory lacks" for name in layers]
        assert (report.findings, report.notes, report.layers) == ([], notes, len(layers))
        shutil.rmtree(root / "tasks")  # the copy needs nothing of the original
        assert images_of(target.root, "two")[0].tolist() == images_of(str(root), "two")[0].tolist()
        rows = json.loads(target.read(f"views/{digest}.json"))["dataset"]
        assert rows["ids_sha256"] == Dataset(target.root).table.ids_digest

    def test_a_view_with_images_in_all_shards_copies_them_all(self, root, target):
        summary = copied(root, target, images=images_of(str(root), "most")[0])
        copy_view(str(root), target.root, "most")
        assert summary.partial == []
        original = content(FolderStore(root))
        assert content(target).items() <= original.items()
        assert images_of(target.root, "most")[0].tolist() == images_of(str(root), "most")[0].tolist()


def test_a_store_is_opened_again_by_its_url(bucket):
    """Without this, the view commands above would read another bucket."""
    store = bucket()
    store.put("a", b"1")
    assert open_store(store.root).read("a") == b"1"


def test_layers_are_copied_and_never_replaced(root, target):
    """Other tests compare the bytes of copies of a directory with a layer."""
    summary = copied(root, target)
    assert (summary.layers, summary.exit_code()) == (["round2"], 0)
    assert "  layers   round2" in summary.table()
    copy, original = (Dataset(one, layers=["round2"]) for one in (target.root, root))
    assert [one.annotations.mask_id.tolist() for one in copy] == [
        one.annotations.mask_id.tolist() for one in original
    ]
    assert copied(root, target).layers == []
    add_layer(root, "round3", images=2)
    damage(FolderStore(root), "layers/round3/masks.bin", offset=30)
    drop(FolderStore(root), "round2")
    add_layer(root, "round2", images=1)
    (root / "layers" / "stopped").mkdir()
    before = content(target)
    summary = copied(root, target)
    assert summary.exit_code() == 1
    assert content(target) == before
    assert summary.failed_layers.keys() == {"round2", "round3"}
    assert "has a layer of this name; choose another one" in summary.failed_layers["round2"]
    assert "layers/round3/masks.bin" in summary.failed_layers["round3"]
    assert "FAILED layer round2: " in summary.table()
