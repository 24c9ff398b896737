"""The process of one part: `python -m benchmarks.gpu.child SETTINGS`, SETTINGS being JSON of the driver."""

import faulthandler
import importlib
import json
import sys
from pathlib import Path

from benchmarks.gpu.part import Record, Setting, Skipped


def run(work: str, setting: Setting, record: Record) -> None:
    """Call a part's function and record how it ended; its errors are raised."""
    module, _, function = work.partition(":")
    try:
        getattr(importlib.import_module(module), function)(setting, record)
    except Skipped as reason:
        record.skipped(str(reason))
    record.done()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    faulthandler.enable()
    # Shortly before the driver kills this process, so that the log says where it hangs.
    faulthandler.dump_traceback_later(max(given["seconds"] - 1.0, 0.1))
    run(
        given["work"],
        Setting(given["device"], given["tiny"], Path(given["folder"]), outputs=Path(given["outputs"])),
        Record(Path(given["records"])),
    )
