"""Golden values and found ones: which keys differ."""

import json
import math
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def expected(side: str) -> dict[str, Any]:
    """The values of "data" or "training"."""
    values: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())[side]
    return values


def plain(value: Any) -> Any:
    """The value as it comes back from JSON."""
    return json.loads(json.dumps(value))


def differences(found: Any, expected: Any, relative: float = 1e-6, key: str = "") -> list[str]:
    """A line for each key at which two values differ; floats may differ by `relative`, all else by nothing."""
    if isinstance(found, dict) and isinstance(expected, dict):
        lines = [f"{key}{name}: only found" for name in found.keys() - expected.keys()]
        lines += [f"{key}{name}: not found" for name in expected.keys() - found.keys()]
        both = [name for name in expected if name in found]
        inner = [differences(found[name], expected[name], relative, f"{key}{name}/") for name in both]
        return sorted(lines) + [line for lines in inner for line in lines]
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        inner = [
            differences(*two, relative, f"{key}{n}/")
            for n, two in enumerate(zip(found, expected, strict=True))
        ]
        return [line for lines in inner for line in lines]
    if isinstance(found, float) and isinstance(expected, float | int) and not isinstance(expected, bool):
        same = math.isclose(found, expected, rel_tol=relative) or (math.isnan(found) and math.isnan(expected))
    else:
        same = type(found) is type(expected) and found == expected
    return [] if same else [f"{key.rstrip('/')}: {str(found)[:200]} instead of {str(expected)[:200]}"]


def without(values: Any, name: str) -> Any:
    """The values without the entries of this name."""
    if isinstance(values, dict):
        return {key: without(value, name) for key, value in values.items() if key != name}
    return values


def check(found: dict[str, Any], expected: dict[str, Any], relative: float = 1e-6) -> None:
    """AssertionError that names the keys that differ."""
    lines = differences(plain(found), expected, relative)
    assert not lines, "\n".join([f"{len(lines)} values differ from those that were recorded", *lines[:40]])
