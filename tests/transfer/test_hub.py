"""A dataset directory in a repository of the Hugging Face Hub, by a local server in its place."""

import pytest

import sa1b
from sa1b.errors import UsageError
from sa1b.programs.transfer.dataset_copy import copy_dataset
from sa1b.storage.errors import DeniedError, MissingError
from sa1b.storage.open import open_store
from sa1b.storage.reader import Reader
from tests.storage.hub import Hub

pytest.importorskip("huggingface_hub")
URL = "hf://datasets/org/name"


def test_a_dataset_is_read_by_exact_ranges_and_copied(root, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def images(where, **options):
        stream = sa1b.Stream(where, global_batch=2, image_size=64, masks=2, **options)
        batches = sa1b.Loader(stream, threads=2, quiet=True)
        return [(batch.ids.tolist(), batch.images.numpy().tobytes()) for batch in batches]

    with Hub(root.parent) as hub:
        options = {"endpoint": hub.url}
        found = images(f"{URL}/root", storage_options=options)
        assert found == images(root)
        with Reader(f"{URL}/root", options=options) as reader:
            hub.ranges.clear()
            whole = (root / "dataset.json").read_bytes()
            assert reader.read_range("dataset.json", 5, 40) == whole[5:45]
            assert hub.ranges == [40]
            with pytest.raises(MissingError, match="never"):
                reader.read_range("never", 0, 1)
        with (
            Reader("hf://datasets/org/other", options=options) as reader,
            pytest.raises(DeniedError, match="HF_TOKEN"),
        ):
            reader.size("dataset.json")
        store = open_store(f"{URL}/root", options=options)
        copy_dataset(store, tmp_path / "copy", quiet=True)
        assert (tmp_path / "copy" / "dataset.json").read_bytes() == whole
        with pytest.raises(UsageError, match="hf can only be read"):
            copy_dataset(root, store, quiet=True)
