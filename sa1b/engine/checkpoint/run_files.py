"""The files of a run, which it may replace."""

import re

from sa1b.errors import UsageError
from sa1b.storage.store import Store

# Files that a run replaces -> first bytes of a file that a run wrote. Profiles have no bytes that distinguish
# them from other profiles of torch.
_REPLACED = {
    "config.json": b'{\n "preset": ',
    "metrics.jsonl": b'{"run": {',
    "predictions.jsonl": b'{"image_id": ',
}
_PROFILE = re.compile(r"operations-\d+\.txt|trace-\d+\.json")


def check_files(store: Store, out: str, *only: str) -> None:
    """UsageError for a folder with a file that the run would replace and that no run wrote.

    The files of a folder with the config.json of a run are its own. `only`: the files that are replaced; by
    default all of a run.
    """
    for name in store.names(""):  # sorted: config.json is the first
        begins = _REPLACED.get(name, b"" if _PROFILE.fullmatch(name) else None)
        if begins is None:
            continue
        beginning = store.read(name)[: len(begins)] if begins else b"not known"
        if begins.startswith(beginning):  # or it is empty
            if beginning and name == "config.json":
                return
        elif not only or name in only:
            raise UsageError(
                f"--out {out}: {name} in it is not of a run of this program, and would be replaced; pass "
                "another folder, or move the file away"
            )
