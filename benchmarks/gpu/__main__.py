"""The command; see the docstring of the package."""

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import benchmarks.gpu as package
from benchmarks.gpu import driver, parts, table
from benchmarks.gpu.driver import Outcome
from benchmarks.gpu.part import Part, Setting


def main(arguments: list[str] | None = None, all_parts: tuple[Part, ...] = parts.PARTS) -> int:
    """Run parts; return the exit code."""
    known = {part.name: part for part in all_parts}
    listed = "\n".join(f"  {part.name:<12} {part.what}" for part in all_parts)
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu",
        description=package.__doc__,
        epilog=f"parts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="parts to run, with those they need; default: all"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: shows only that the code runs")
    parser.add_argument(
        "--out", type=Path, help="results file; by default benchmarks/results/<gpu>.json on a GPU"
    )
    parser.add_argument("--folder", type=Path, help="folder of datasets and logs, kept for the next run; "
                        "by default a temporary one")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=parts.SECONDS, help="time limit (%(default)s)")
    given = parser.parse_args(arguments)
    for name in given.parts:
        if name not in known:
            parser.error(f"{name}: is no part; choose from {', '.join(known)}")
    wanted = {need for name in given.parts or known for need in (name, *known[name].needs)}
    gpu = table.gpu_name(given.device)
    out = given.out or (table.path_of(gpu) if given.device == "cuda" and not given.tiny else None)
    outcomes: dict[str, Outcome] = {}

    def ended(part: Part, outcome: Outcome) -> None:
        outcomes[part.name] = outcome
        print("\n".join(table.lines(part.name, outcome)), flush=True)
        if out is not None:
            table.write(out, gpu, outcomes)

    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sa1b-gpu-")))
        setting = Setting(given.device, given.tiny, folder.resolve())
        chosen = [part for part in all_parts if part.name in wanted]
        print(f"{gpu}: {len(chosen)} parts, at most {given.seconds:.0f} s", flush=True)
        began = time.monotonic()
        try:
            driver.run(chosen, setting, seconds=given.seconds, ended=ended)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    print(table.summary(outcomes, time.monotonic() - began))
    if out is not None:
        print(f"results in {out}")
    return int(any(outcome.state not in ("ok", "skipped") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
