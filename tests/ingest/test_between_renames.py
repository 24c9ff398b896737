"""A directory is read while a command that changes it stands at each change, and is stopped at each one."""

import contextlib
import hashlib
import itertools
import re
import shutil
import signal
import threading

import fsspec
import pytest

import sa1b
from sa1b.errors import Sa1bError
from tests import kit
from tests.directories import images, reshard
from tests.shards.tiny_source import pairs, write_source
from tests.steps import steps
from tests.storage.store_server import StoreServer
from tests.storage.test_wrong_answers import ended

pytestmark = pytest.mark.usefixtures("short_commands")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another sa_000002.tar: one image with other bytes, and others."""
    return write_source(
        tmp_path_factory.mktemp("other") / "sa_000002.tar", pairs([300, *range(400, 407)], seed=7)
    )


def second(root, whole, tars):
    """Of the second source alone."""
    shutil.rmtree(root)
    reshard(root, tars[1])


def unlisted(root, whole, tars):
    """The shards of the second source are there, and nothing says so."""
    kit.run("reshard", "--out", root, "--drop", "sa_000002")
    for name in ("sa1b-000002-0000.tar", "sa1b-000002-0000.parquet"):
        kit.put(root, name, kit.files(whole)[name])


def lost(*names):
    """Without some files that no reader needs."""
    return lambda root, *_: [kit.put(root, name, None) for name in names]


def nothing(root, *_):
    shutil.rmtree(root)
    root.mkdir()


def unchanged(root, *_):
    pass


MASKS = "layer add ROOT MASKS --existing replace --name"
CHANGES = {  # what is there before, the command, its exit code
    "the first sources": (nothing, "reshard TARS --out ROOT --images-per-shard 5", 3),
    "another source": (second, "reshard TARS --out ROOT --images-per-shard 5", 3),
    "a source again": (unchanged, "reshard TARS --out ROOT --images-per-shard 5 --redo sa_000001", 3),
    "a replaced source": (unchanged, "reshard OTHER --out ROOT --images-per-shard 5 --replace", 0),
    "a replaced last source": (second, "reshard OTHER --out ROOT --images-per-shard 5 --replace", 0),
    "a dropped source": (unchanged, "reshard --out ROOT --drop sa_000001", 0),
    "a dropped last source": (second, "reshard --out ROOT --drop sa_000002", 0),
    "lost indexes": (lost("sa1b-000001-0001.parquet", "sa1b-000002-0000.parquet"), "index ROOT", 0),
    "a lost task file": (lost("tasks/sa_000001.json"), "index ROOT", 0),
    "lost rows": (lost("tasks/sa_000001.samples"), "index ROOT --tables", 0),
    "unlisted shards": (unlisted, "index ROOT", 0),
    "a view": (unchanged, "view ROOT --ids IDS --masks-where area>3 --name second", 0),
    "a view of the same name": (unchanged, "view ROOT --images-where image_id<300 --name most --overwrite", 0),
    "a layer": (unchanged, f"{MASKS} third", 0),
    "a layer of the same name": (unchanged, f"{MASKS} round2 --overwrite", 0),
    "a copy": (nothing, "copy WHOLE ROOT", 0),
    "a copy over a part of it": (second, "copy WHOLE ROOT", 0),
}  # fmt: skip


class Scene:
    """A directory before one of the changes, and the words of its command."""

    def __init__(self, case, whole, tars, other, folder):
        before, words, self.code = CHANGES[case]
        self.root = shutil.copytree(whole, folder / "root")
        before(self.root, whole, tars)
        folder = whole.parent
        places = {"ROOT": self.root, "OTHER": other, "IDS": folder / "most.txt", "MASKS": folder / "masks"}
        self._words = [str({**places, "WHOLE": whole}.get(word, word)) for word in words.split()]
        self._tars = list(map(str, tars))

    def words(self, root=None):
        """The command, for the directory or another one."""
        found = [one for word in self._words for one in (self._tars if word == "TARS" else [word])]
        return [str(root or self.root) if word == str(self.root) else word for word in found]


@pytest.fixture
def memory():
    """A folder of a bucket in memory, empty."""
    system = fsspec.filesystem("memory")
    yield "memory://between/shards"
    if system.exists("/between"):
        system.rm("/between", recursive=True)


@pytest.fixture
def scene(whole, tars, other, tmp_path):
    return lambda case: Scene(case, whole, tars, other, tmp_path)


def digest(batch):
    tensors = (batch.ids, batch.images, batch.mask_ids, batch.boxes, batch.areas)
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in tensors)).hexdigest()


def stream(root, **options):
    options = {"image_size": 32, "masks": 2, "damage_log": "/dev/null", **options}
    return sa1b.Stream(root, **{"global_batch": 2, "order": "sequential", **options})


def state(root):
    """What a new reader finds: images and batches, or None; and what it reads with a view or a layer, or None."""
    try:
        found = images(root)
    except Sa1bError as error:
        if not re.search(
            "no dataset there|not there, and .* done; run `sa1b reshard --out .* --finish`", str(error)
        ):
            raise
        return None, {}
    more = {}
    for view in ("most", "second"):
        with contextlib.suppress(Sa1bError):
            more[view] = [one for batch in stream(root, view=view) for one in batch.ids.tolist()]
    for layer in ("round2", "third"):
        with contextlib.suppress(Sa1bError):
            more[layer] = images(root, layers=[layer])
    return (found, [digest(batch) for batch in stream(root)] if found else []), more


class Allowed:
    """The states before and after a command, and the one in which a replaced source is in no dataset."""

    def __init__(self, scene, case, folder):
        self.case, self.old = case, state(scene.root)
        self.after = shutil.copytree(scene.root, folder / "after", dirs_exist_ok=True)
        kit.run(*scene.words(self.after), code=scene.code)
        self.new = state(self.after)
        self.whole = [self.old[0], self.new[0]]
        if case.startswith("a replaced"):
            without = shutil.copytree(scene.root, folder / "without")
            kit.run("reshard", "--out", without, "--drop", "sa_000002")
            self.whole.append(state(without)[0] or ({}, []))

    def check(self, root):
        """A reader that comes now finds one of them."""
        now, more = state(root)
        assert now in self.whole
        for name, found in more.items():
            either = [one[1][name] for one in (self.old, self.new) if name in one[1]]
            if isinstance(found, dict):  # of the images that there are, the masks of one layer
                either = [
                    {image_id: one[image_id] for image_id in found}
                    for one in either
                    if one.keys() >= found.keys()
                ]
            assert found in either
        # The layer is made again in its place, and a name that moves stands for two views for a moment.
        if self.case not in ("a layer of the same name", "a view of the same name", "a replaced source"):
            assert more.keys() >= self.old[1].keys() & self.new[1].keys()


@pytest.mark.parametrize("case", CHANGES)
def test_a_reader_finds_the_old_or_the_new_directory_at_each_change(scene, case, tmp_path):
    one = scene(case)
    allowed = Allowed(one, case, tmp_path / "copies")
    options = {"order": "shuffle", "epochs": None, "seed": 3}
    is_stable = not case.startswith(("a replaced", "a dropped"))
    reading = iter(stream(one.root, **options)) if allowed.old[0] else None
    if reading:
        shutil.copytree(one.root, tmp_path / "before")
    expected = iter(stream(tmp_path / "before", **options)) if reading else None
    with steps(one.root, *one.words()) as changes:
        for _ in changes:
            allowed.check(one.root)
            if reading and is_stable:
                assert digest(next(reading)) == digest(next(expected))
    assert changes.code == one.code
    assert state(one.root) == allowed.new
    assert kit.files(one.root) == kit.files(allowed.after) or "layer" in case


IN_THIS_PROCESS = ["a dropped source", "lost rows", "a view", "a layer", "a layer of the same name"]


@pytest.mark.parametrize("case", [*IN_THIS_PROCESS, "a copy", "a copy over a part of it"])
def test_a_reader_of_a_bucket_finds_the_old_or_the_new_directory_at_each_object(
    scene, case, memory, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = scene(case)
    allowed = Allowed(one, case, tmp_path / "copies")
    for name, data in kit.files(one.root).items():
        kit.put(memory, name, data)

    def read(_):
        try:
            allowed.check(memory)
        except BaseException as error:
            wrong.append(error)
        changes.at = changes.seen + 1

    wrong = []
    with kit.fault(memory, 1, read) as changes:
        kit.run(*one.words(memory), code=one.code)
    assert wrong == []
    assert changes.seen
    assert state(memory) == allowed.new


@pytest.mark.parametrize("case", [case for case, one in CHANGES.items() if one[1].startswith("reshard")])
def test_a_reader_of_a_bucket_finds_the_old_or_the_new_directory_at_each_object_of_reshard(
    scene, case, tmp_path, monkeypatch
):
    one = scene(case)
    allowed = Allowed(one, case, tmp_path / "copies")
    wrong, seen, alone = [], [], threading.Lock()

    def read(what, key):
        if what in ("PUT", "CREATE", "REPLACE", "DELETE", "COMPLETE") and ".claim" not in key:
            with alone:
                try:
                    allowed.check(store.root)
                except BaseException as error:
                    wrong.append(error)
            seen.append(key)

    with StoreServer(page=100) as store:
        store.load(one.root)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "KEY")
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        store.before = read
        done = ended((*one.words(store.root), "--scratch", tmp_path / "scratch"))
        store.before = lambda *_: None
        assert (done.code, wrong) == (one.code, [])
        assert len(seen) > 3
        assert state(store.root) == allowed.new
        assert store.files() == kit.files(allowed.after)


@pytest.mark.parametrize("following", ["the same", "of another source"])
def test_the_rows_that_a_killed_drop_leaves_go_with_the_next_run(whole, tars, tmp_path, following):
    root, drop = shutil.copytree(whole, tmp_path / "root"), ("reshard", "--drop", "sa_000002", "--out")
    with steps(root, *drop, root) as changes:
        for name in changes:
            if name == "tasks/sa_000002.samples":
                changes.kill()
                break
    kit.run("index", root)  # removes the claim
    assert (root / name).exists()
    kit.run(*drop, root) if following == "the same" else reshard(root, tars[0])
    assert not [*root.glob("tasks/sa_000002*"), *root.glob("sa1b-000002*")]
    assert kit.run("verify", root, "--json").json["findings"] == []


@pytest.mark.parametrize("out", [None, "views", "view.json"])
def test_what_a_killed_view_leaves_goes_with_the_next_view(whole, tmp_path, out):
    root, words = shutil.copytree(whole, tmp_path / "root"), ["view", whole, "--images-where", "masks > 2"]
    base, words = (root / "views", ["view", root, *words[2:]]) if out is None else (tmp_path / "out", words)
    words += ["--out", base / out] if out else []
    with steps(base, *words) as changes:
        for _ in changes:
            changes.kill()
            break
    (left,) = base.rglob(".*.partial")
    mine = left.with_name(".mine.partial")
    mine.touch()
    kit.run(*words)
    assert [*base.rglob(".*")] == [mine]


def test_a_run_that_converts_nothing_reads_no_list_of_warnings(whole, tars, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "KEY")
    with StoreServer(page=100) as store:
        store.load(whole)
        words = ("--out", store.root, "--endpoint", store.url, "--images-per-shard", 5)
        assert re.search("warning: area +1 image, kept", kit.run("reshard", *tars, *words, code=3).out)
        assert store.asked("GET", "*/dataset.json")
        assert not store.asked("GET", "*/warnings.jsonl")


@pytest.mark.parametrize("case", [case for case in CHANGES if case.startswith(("a replaced", "a dropped"))])
def test_a_stream_of_images_that_go_gives_the_old_ones_or_an_error(scene, case, tmp_path):
    one = scene(case)
    right = {
        int(image_id): image
        for batch in stream(one.root)
        for image_id, image in zip(batch.ids, batch.images, strict=True)
    }
    reading = iter(stream(one.root, order="shuffle", epochs=None))
    next(reading)  # after an error it may give no more
    with steps(one.root, *one.words()) as changes:
        for _ in changes:
            with contextlib.suppress(Sa1bError, StopIteration):
                batch = next(reading)
                assert all(
                    image.equal(right[int(one)]) for one, image in zip(batch.ids, batch.images, strict=True)
                )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
@pytest.mark.parametrize("case", CHANGES)
def test_a_command_that_was_stopped_at_each_change_is_ended_by_the_same_command(scene, case, how, tmp_path):
    one = scene(case)
    allowed = Allowed(one, case, tmp_path / "copies")
    for at in itertools.count(
        1 if how == signal.SIGINT else 2, 2
    ):  # at each second change, to end in seconds
        count = 0
        with steps(one.root, *one.words()) as changes:
            for count, _ in enumerate(changes, 1):
                if count == at:
                    changes.send(how)
                    if how == signal.SIGKILL:
                        changes.kill()
                        break
        allowed.check(one.root)
        if count < at:
            break
        assert changes.code in (None, 130, one.code)
    assert state(one.root) == allowed.new
    if case == "a dropped last source":  # its rows may be left: nothing says any more that there was a source
        assert changes.code in (0, 2)
        assert kit.files(one.root).keys() <= {"tasks/sa_000002.samples"}
        return
    if (
        case == "a lost task file" and changes.code == 2
    ):  # as the message says, where the new one is not listed yet
        (one.root / "dataset.json").unlink()
        changes.code = kit.run("index", one.root).code
    assert changes.code == one.code
    if "view" in case:  # `sa1b view` removes nothing that a killed one left, `sa1b index` does
        kit.run("index", one.root)
        kit.run("index", allowed.after)
    right = [one.root / path.relative_to(allowed.after) for path in allowed.after.rglob("*")]
    assert sorted(one.root.rglob("*")) == sorted(right)
    if "layer" not in case:
        assert kit.files(one.root) == kit.files(allowed.after)
