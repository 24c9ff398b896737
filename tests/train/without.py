"""The training command without its optional techniques: `python -m tests.train.without MODEL null --flags`.

`python -m tests.train.without refused RUNS` prints the exit codes of several runs that are refused, RUNS being
the flags of each as JSON.

The modules of the techniques cannot be imported, as if their files were deleted. All modules of the package are
imported anew, so that none has one of them from before.
"""

import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

TECHNIQUES = ("planner", "watch.stragglers", "watch.watchdog")
SECOND = "tests.engine.reconstruction"  # a model
MODULES = tuple(f"sa1b.engine.{name}" for name in TECHNIQUES)


class Absent:
    """A finder of modules for which those of the techniques do not exist."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def main() -> int:
    for name in [one for one in sys.modules if one.partition(".")[0] == "sa1b" or one == SECOND]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent())
    import torch

    from sa1b import train
    from tests.engine import reconstruction

    torch.set_num_threads(1)
    if sys.argv[1] == "refused":
        print(json.dumps([train.main(arguments=flags) for flags in json.loads(sys.argv[2])]))
        return 0
    del sys.argv[1:3]
    code = train.main(reconstruction.PRESETS)
    there = [name for name in sys.modules if name.startswith(MODULES)]
    print(f"imported: {there}")
    return code


if __name__ == "__main__":
    code = main()
    from sa1b.train import exit_at_once

    exit_at_once(code)
