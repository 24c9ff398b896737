"""Write the inputs and the expected values of the golden tests: python tests/golden/make.py [data] [training]

The values of this folder were made by the package of commit f4f6f1a8, with the tests of a later commit. They say
what the package computed then, so they are never made again to let a rewrite pass: a value that changes on purpose
is a change of a format, of a command or of training that users must be told of, and then only its own lines of
expected.json change.
"""

import json
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SIDES = ("data", "training")


def text(values: dict[str, dict[str, object]]) -> str:
    """JSON with one value a line."""
    sides = []
    for side, of_side in values.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in of_side.items()]
        sides.append(f" {json.dumps(side)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(sides) + "\n}\n"


def main() -> None:
    sys.path.insert(0, str(Path.cwd()))
    sides = sys.argv[1:] or list(SIDES)
    path = FOLDER / "expected.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    for side in sides:
        if side not in SIDES:
            sys.exit(f"{side}: must be one of {', '.join(SIDES)}")
        module = import_module(f"tests.golden.{side}_values")
        shutil.rmtree(FOLDER / side, ignore_errors=True)
        module.make(FOLDER / side)
        with tempfile.TemporaryDirectory() as scratch:
            values[side] = module.record(FOLDER / side, Path(scratch))
    path.write_text(text({side: values[side] for side in SIDES if side in values}))


if __name__ == "__main__":
    main()
