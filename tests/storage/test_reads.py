"""Reads of a dataset at every kind of root: the samples of the folder, or an error that names the file."""

import contextlib
import errno
import gc
import os
import pickle
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from torch.utils.data import DataLoader

import sa1b
from sa1b.errors import Sa1bError, ShardError
from sa1b.storage.errors import (
    DeniedError,
    ExpiredError,
    MissingError,
    ReplacedError,
    StorageError,
    UnavailableError,
)
from tests import kit
from tests.directories import images, reshard
from tests.shards.tiny_source import pairs, write_source
from tests.storage.service import Service
from tests.storage.store_server import StoreServer
from tests.storage.test_wrong_answers import (
    EVER,
    REPOSITORY,
    SHARD,
    assert_stops,
    batches,
    expected,
    made,
    of_store,
    other,
    store,
    stream_of,
    tars,
)
from tests.storage.tls_proxy import certificate

__all__ = ["expected", "made", "other", "store", "tars"]
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE")


@pytest.fixture
def keyless(monkeypatch, tmp_path):
    """Credentials are in a file that does not exist yet."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "credentials"))
    return tmp_path / "credentials"


def keys(file, name):
    file.write_text(f"[default]\naws_access_key_id = {name}\naws_secret_access_key = secret\n")


# Kinds of roots

ENCRYPTED = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "0" * 32}
OF_S3 = {  # options beside those of a usual store
    "s3": {},
    "anonymous": {"key": None, "secret": None, "anon": True},
    "requester pays": {"requester_pays": True},
    "encrypted": {"s3_additional_kwargs": ENCRYPTED},
    "signed in the header": {},
    "odd name": {},
    "by a variable": {},
    "by a proxy": {"endpoint_url": "http://store.invalid"},
}


def root_of(kind, made, store, monkeypatch):
    """The root of a kind with the files of a folder, and its storage options."""
    if kind in ("folder", "file"):
        return made if kind == "folder" else f"file://{made}", None
    if kind == "memory":
        fsspec.filesystem("memory").put(str(made), f"/{store.prefix}", recursive=True)
        return f"memory://{store.prefix}", None
    if kind == "odd name":
        store.move(f"{store.prefix}/deep/b c+ü")
    store.load(made)
    if kind.endswith("by a proxy"):
        monkeypatch.setenv("http_proxy", store.url)
    if kind.startswith("web"):
        return store.web if kind == "web" else store.web.replace(store.url, "http://web.invalid"), None
    if kind == "signed in the header":
        store.fault("links", "GET", times=EVER)
        store.fault("links", "HEAD", times=EVER)
    if kind == "by a variable":
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        return store.root, None
    return store.root, {**store.options, **OF_S3[kind]}


@pytest.mark.parametrize("kind", ["folder", "file", "memory", "web", "web by a proxy", *OF_S3])
def test_every_kind_of_root_has_the_samples_of_the_folder(kind, made, store, monkeypatch):
    root, options = root_of(kind, made, store, monkeypatch)
    dataset, whole = sa1b.open(root, storage_options=options), images(made)
    copy = pickle.loads(pickle.dumps(dataset))
    for one in (dataset, copy):
        assert {sample.image_id: (sample.jpeg, sample.annotations.to_json()) for sample in one} == whole
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda i: dataset[i % len(dataset)], range(4 * len(dataset))))
    assert [sample.jpeg for sample in found] == [jpeg for jpeg, _ in whole.values()] * 4


@pytest.mark.parametrize("kind", ["folder", "memory", "web", "s3"])
def test_a_missing_shard_and_a_missing_dataset_are_named_at_once(kind, made, store, tmp_path, monkeypatch):
    root, options = root_of(kind, shutil.copytree(made, tmp_path / "root"), store, monkeypatch)
    name = "sa1b-000002-0000.tar"
    dataset = sa1b.open(root, storage_options=options)
    if kind in ("web", "s3"):
        del store.objects[f"{store.prefix}/{name}"]
    else:
        kit.put(root, name, None)
    before = len(store.log)
    with pytest.raises(MissingError, match=rf"{root}/{name}: the shard is missing") as caught:
        dataset.by_id(300)
    assert caught.value.url == f"{root}/{name}"
    assert len(store.log) - before <= 2
    assert dataset.by_id(100).image_id == 100
    with pytest.raises((MissingError, Sa1bError), match=f"{root}/none"):
        sa1b.open(f"{root}/none", storage_options=options)


# What a web server answers

OF_THE_WEB = ["500", "503", "short", "longer", "shifted", "cut", "reset", "flipped", "noise"]


@pytest.mark.parametrize("kind", [*OF_THE_WEB, "garbled", "surplus", "bare"])
def test_a_wrong_answer_of_a_web_server_that_passes_changes_no_batch(made, store, tmp_path, expected, kind):
    store.load(made)
    fault = store.fault(kind, "GET", SHARD, times=2)
    assert batches(stream_of(store.web, tmp_path)) == expected[0]
    assert fault.hits == 2
    assert not (tmp_path / "damage.jsonl").exists()


def test_a_range_of_an_object_of_unknown_size_is_taken(made, store, tmp_path, expected):
    store.load(made)
    fault = store.fault("unsized", "GET", SHARD, times=EVER)
    assert batches(stream_of(store.web, tmp_path)) == expected[0]
    assert fault.hits


def test_a_wrong_body_in_the_cache_of_a_proxy_is_not_taken_for_damage(made, store, tmp_path, expected):
    store.load(made)
    faults = [store.fault("cached", "GET", key, times=EVER) for key in (SHARD, "*/samples-*.bin")]
    assert batches(stream_of(store.web, tmp_path)) == expected[0]
    assert all(fault.hits for fault in faults)
    assert not (tmp_path / "damage.jsonl").exists()


def test_a_store_that_does_not_accept_its_own_etag_is_read(made, store, tmp_path, expected):
    store.load(made)
    store.fault("strange", "GET", times=EVER)
    assert batches(of_store(store, tmp_path)) == expected[0]


def test_signatures_that_are_refused_after_a_time_are_renewed(made, store):
    store.load(made)
    dataset, whole = sa1b.open(store.root, storage_options=store.options), images(made)
    for _ in range(2):
        assert [sample.jpeg for sample in dataset] == [jpeg for jpeg, _ in whole.values()]
        now = time.time()
        while int(time.time()) == int(now):  # signatures of one second are equal
            time.sleep(0.05)
        store.faults.clear()
        store.fault("revoked", "GET", times=EVER)
    assert [sample.jpeg for sample in dataset] == [jpeg for jpeg, _ in whole.values()]


STAYS = [
    ("whole", 1, StorageError, "the server ignores byte ranges"),
    ("400", 1, StorageError, "InvalidRequest: InvalidRequest of the test"),
    ("403", 2, DeniedError, "access denied"),
    ("404", 2, MissingError, "the shard is missing"),
    ("412", 1, StorageError, "PreconditionFailed"),
    ("retagged", 1, ReplacedError, "replaced since its first read"),
    ("replaced", 1, ReplacedError, "replaced since the dataset was opened"),
    ("replaced", 12, ReplacedError, "replaced since"),
]


@pytest.mark.parametrize(("kind", "at", "error", "message"), STAYS)
def test_a_wrong_answer_of_a_web_server_that_stays_stops_the_stream_with_the_url(
    made, other, store, tmp_path, kind, at, error, message
):
    store.load(made)
    store.next = {f"{store.prefix}/{name}": data for name, data in kit.files(other).items()}
    fault = store.fault(kind, "GET", SHARD, at=at, times=1 if kind == "replaced" else EVER)
    assert_stops(stream_of(store.web, tmp_path), "stream", store.web, error, message)
    assert fault.hits
    assert not (tmp_path / "damage.jsonl").exists()


@pytest.mark.parametrize("root", ["root", "web"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_manifest_that_is_replaced_while_it_is_read_is_one_of_both(made, store, tmp_path, at, root):
    one = tmp_path / "one"
    reshard(one, write_source(tmp_path / "sa_000009.tar", pairs([7, 8])))
    store.load(made)
    store.next = {f"{store.prefix}/{name}": data for name, data in kit.files(one).items()}
    fault = store.fault("replaced", "GET", "*/dataset.json", at=at)
    options = store.options if root == "root" else None
    found = images(getattr(store, root), storage_options=options)
    assert found in (images(made), images(one))
    assert fault.hits or found == images(made)


# Servers that are none

AZURE = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5;BlobEndpoint=http://127.0.0.1:{port}/a;"
SERVER = "http://127.0.0.1:{port}"
URLS = {  # protocol -> package, URL, options
    "s3": ("s3fs", "s3://data/root", {"key": "KEY", "secret": "secret", "endpoint_url": SERVER}),
    "http": ("aiohttp", "http://127.0.0.1:{port}/root", {}),
    "gs": ("gcsfs", "gs://data/root", {"token": "anon", "endpoint_url": SERVER}),
    "az": ("adlfs", "az://data/root", {"connection_string": AZURE}),
    "hf": ("huggingface_hub", "hf://datasets/org/name", {"token": False, "endpoint": SERVER}),
}


@pytest.mark.parametrize(
    "answer", [None, b"", b"\x16\x03 no HTTP\r\n\r\n"], ids=["closed", "reset", "garbled"]
)
@pytest.mark.parametrize("protocol", URLS)
def test_a_server_that_is_none_is_named_at_the_deadline(protocol, answer, tmp_path):
    package, url, options = URLS[protocol]
    pytest.importorskip(package)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, seen = listening.getsockname()[1], []
        if answer is None:
            listening.close()
        else:
            threading.Thread(target=answering, args=(listening, answer, seen), daemon=True).start()
        root = url.format(port=port)
        options = {
            name: one.format(port=port) if isinstance(one, str) else one for name, one in options.items()
        }
        with pytest.raises(UnavailableError, match=rf"^{root}/dataset\.json.* in 0\.3 s; last: ") as caught:
            stream_of(root, tmp_path, storage_options=options, deadline=0.3)
        assert caught.value.last_error
        assert answer is None or seen


def answering(listening, answer, seen):
    """Send the same bytes on every connection, and close it, until the socket is closed."""
    while True:
        try:
            connection, _ = listening.accept()
            with connection:
                seen.append(connection.recv(65536))
                connection.sendall(answer)
        except OSError:
            return


def test_an_outage_in_the_middle_is_waited_out(made, store, tmp_path, expected):
    store.load(made)
    for reader in (stream_of(store.web, tmp_path), of_store(store, tmp_path)):
        fault = store.fault("reset", "GET", SHARD, at=4, times=8)
        assert batches(reader) == expected[0]
        assert fault.hits == 8
        store.faults.clear()


# Credentials


def test_no_credentials_at_all_are_denied_with_the_places_where_they_are_looked_up(made, store, keyless):
    store.load(made)
    with pytest.raises(DeniedError, match=rf"^{store.root}/dataset\.json.*AWS_ACCESS_KEY_ID"):
        sa1b.open(store.root, storage_options={"endpoint_url": store.url})


def test_expired_credentials_are_looked_up_again_and_fresh_ones_are_used(made, store, keyless, tmp_path):
    store.load(made)
    whole = images(made)
    keys(keyless, "OLD")
    options = {"endpoint_url": store.url}
    dataset = sa1b.open(store.root, storage_options=options)
    assert dataset[0].jpeg == whole[100][0]
    fault = store.fault("expired OLD", "GET", SHARD, times=EVER)
    for read in (
        lambda: dataset[1],
        lambda: batches(stream_of(store.root, tmp_path, storage_options=options)),
    ):
        with pytest.raises(ExpiredError, match=rf"^{store.root}/sa1b-.*\.tar: expired .*~/\.aws/credentials"):
            read()
    assert fault.hits >= 4
    keys(keyless, "FRESH")
    assert [sample.jpeg for sample in dataset] == [jpeg for jpeg, _ in whole.values()]
    store.faults.clear()
    for key in ("*/dataset.json", "*/samples-*.bin"):
        fault = store.fault("expired", "GET", key, times=EVER)
        with pytest.raises(ExpiredError, match=rf"^{store.root}/.*expired"):
            sa1b.open(store.root, storage_options=options)
        assert fault.hits
        store.faults.clear()
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    store.fault("expired", "GET", SHARD)
    assert images(store.root, storage_options=options) == whole


SECRET = "aVerySecretKey/+"


@pytest.mark.parametrize(
    "kind", ["400", "403", "404", "shifted", "whole", "retagged", "expired", "503", "reset"]
)
def test_no_message_has_a_credential(made, store, tmp_path, kind, capfd, caplog):
    store.load(made)
    store.options |= {"secret": SECRET, "token": SECRET[::-1]}
    while True:
        try:
            stream = of_store(store, tmp_path, deadline=0.3)
            break
        except UnavailableError:  # a busy machine
            continue
    store.fault(kind, "GET", SHARD, at=2 if kind == "retagged" else 1, times=EVER)
    with pytest.raises(StorageError, match=store.root) as caught:
        batches(stream)
    error, said = caught.value, caplog.text + "".join(capfd.readouterr())
    while error is not None:
        said += repr(error) + str(error)
        error = error.__cause__ or error.__context__
    assert not [word for word in (SECRET, SECRET[::-1], "Signature", "X-Amz") if word in said]


# TLS


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_certificates_are_verified_by_the_settings_of_the_client(made, tmp_path, monkeypatch):
    for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tables"))
    own = certificate(tmp_path)
    with StoreServer(secured=own) as store:
        store.load(made)
        with pytest.raises(
            StorageError, match=rf"^{store.root}/dataset\.json.*SSLCertVerificationError.*AWS_CA_BUNDLE"
        ) as caught:
            sa1b.open(store.root, storage_options=store.options)
        assert not isinstance(caught.value, UnavailableError)
        assert store.log == []
        for verify in (str(own[0]), False):
            options = {**store.options, "client_kwargs": {"verify": verify}}
            assert images(store.root, storage_options=options) == images(made)
        for name in ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"):
            with monkeypatch.context() as patch:
                patch.setenv(name, str(own[0]))
                assert images(store.root, storage_options=store.options) == images(made)


# Packages


def test_a_file_system_that_is_not_installed_is_named_with_what_installs_it(monkeypatch):
    def absent(protocol):
        raise ImportError("Install adlfs to access Azure")

    monkeypatch.setattr(fsspec, "get_filesystem_class", absent)
    with pytest.raises(StorageError, match=r"^az://data: Install adlfs .*; run pip install 'sa1b\[azure\]'"):
        sa1b.open("az://data")


def test_a_folder_is_read_without_the_packages_for_urls(made):
    script = (
        f"import sys, sa1b\nassert sa1b.open({str(made)!r})[0].jpeg\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    line = [sys.executable, "-c", script]
    done = subprocess.run(line, capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert not set(done.stdout.split()) & {"fsspec", "s3fs", "botocore", "aiohttp", "torch"}


# Local disks


@contextlib.contextmanager
def failing(*numbers, stays=False, ending=".tar"):
    """A disk that answers reads of files with these errors; yields those that are left."""
    left, pread = list(numbers), os.pread

    def read(descriptor, length, start):
        if left and Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ending:
            number = left[0] if stays else left.pop()
            raise OSError(number, os.strerror(number))
        return pread(descriptor, length, start)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", read)
        yield left


def test_input_output_errors_of_a_disk_that_pass_change_no_batch(made, tmp_path, expected):
    with failing(errno.EIO, errno.ESTALE) as left:
        assert batches(stream_of(made, tmp_path)) == expected[0]
    assert left == []
    assert not (tmp_path / "damage.jsonl").exists()


def test_an_input_output_error_that_stays_stops_the_stream_with_the_path(made, tmp_path):
    message = rf"^{made}/sa1b-.*\.tar.* in 0\.3 s; last: .*Input/output error"
    with failing(errno.EIO, stays=True), pytest.raises(UnavailableError, match=message):
        batches(stream_of(made, tmp_path, deadline=0.3))
    assert not (tmp_path / "damage.jsonl").exists()


SMALL = "sa1b-000002-0000.tar"  # the shard of the images 300 to 302


def cut(path):
    path.write_bytes(path.read_bytes()[:600])


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def folder(path):
    path.unlink()
    path.mkdir()


def flipped(path):
    data = path.read_bytes()
    path.write_bytes(bytes(byte ^ 1 for byte in data))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (cut, ShardError, "the object ends at byte 600"),
        (flipped, ShardError, "in two separate reads; the stored bytes are damaged"),
        (pipe, StorageError, "is a named pipe, not a file; restore the file"),
        (folder, StorageError, "is a folder, not a file; restore the file"),
    ],
)
def test_what_is_no_intact_shard_is_named_at_once(made, tmp_path, change, error, message):
    root = shutil.copytree(made, tmp_path / "root")
    change(root / SMALL)
    dataset = sa1b.open(root)
    for read in (lambda: dataset.by_id(300), lambda: list(dataset.samples([len(dataset) - 1]))):
        with pytest.raises(error, match=rf"{root}/{SMALL}.*{message}"):
            read()
    assert dataset.by_id(100).image_id == 100


def test_a_shard_that_may_not_be_read_is_denied(made, tmp_path):
    root = shutil.copytree(made, tmp_path / "root")
    dataset = sa1b.open(root)

    with (
        kit.when("read", root / SMALL, kit.fail, errno.EACCES),
        pytest.raises(DeniedError, match=rf"^{root}/{SMALL}: .*Permission denied.*change its permissions"),
    ):
        dataset.by_id(300)


def test_a_shard_that_was_restored_is_read_from_its_new_file(made, tmp_path):
    """The file that is open is damaged, that of the name is not."""
    root = shutil.copytree(made, tmp_path / "root")
    dataset = sa1b.open(root)
    before = dataset.by_id(300).jpeg
    for change in (flipped, cut):
        old = (root / SMALL).rename(tmp_path / "old")
        shutil.copy(made / SMALL, root / SMALL)
        change(old)
        assert dataset.by_id(300).jpeg == before


def test_more_shards_are_read_than_files_may_be_open(tmp_path):
    tar = write_source(tmp_path / "sa_000001.tar", pairs(range(60)))
    root = tmp_path / "root"
    reshard(root, tar, images_per_shard=1)
    gc.collect()  # files of earlier tests that nobody closed
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    dataset = sa1b.open(root)
    assert len(dataset.shards) == 60
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, limit[1]))
    try:
        found = [sample.image_id for _ in range(2) for sample in dataset]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert found == [*range(60)] * 2


# Workers


def test_an_error_keeps_its_class_on_the_way_out_of_a_worker(made, store, tmp_path):
    store.load(made)
    stream = of_store(store, tmp_path)
    store.fault("403", "GET", SHARD, at=2, times=EVER)
    with pytest.raises(DeniedError, match=store.root) as caught:
        list(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork"))
    assert type(caught.value) is DeniedError


# Faults at random, through a proxy


KINDS = ("latency", "reset_body", "busy", "short", "flip")


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 30))])
def test_random_faults_change_no_batch_and_their_seed_replays_them(made, store, tmp_path, expected, seed):
    store.move("faults/root")  # they depend on the names of the objects
    store.load(made)
    logs = []
    for way in ("stream", "loader"):
        with Service("fault_proxy", int(store.url[-5:]), seed, 0.2, *KINDS) as proxy:
            options = {**store.options, "endpoint_url": proxy.url}
            shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
            assert batches(stream_of(store.root, tmp_path, storage_options=options), way) == expected[0]
            logs.append(proxy.ask({"do": "log"})["faults"])
    assert logs[0]
    assert logs[0] == logs[1]
    assert not (tmp_path / "damage.jsonl").exists()
