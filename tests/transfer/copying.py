"""What the tests of copies share: the content of a directory of any kind, and a quiet copy."""

import fsspec

from sa1b.programs.transfer.dataset_copy import copy_dataset


def copied(root, dest, **options):
    return copy_dataset(root, dest, quiet=True, **options)


def content(store):
    """Name -> bytes of every object, also hidden ones."""
    if store.is_local:
        files = (path for path in store.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(store.folder)): path.read_bytes() for path in files}
    memory = fsspec.filesystem("memory")
    folder = store.root.removeprefix("memory:/")
    return {name.removeprefix(f"{folder}/"): memory.cat_file(name) for name in memory.find(folder)}


def damage(store, name, offset=3000):
    data = bytearray(store.read(name))
    data[offset] ^= 0x40
    store.put(name, bytes(data))
