"""The tests of the suite that need a GPU: `pytest -m gpu`, in several processes."""

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.part import Record, Setting
from sa1b.workers import available_cpus

_PROCESSES = 16  # kernels are compiled by the processor


def work(setting: Setting, record: Record) -> None:
    """Run the tests and record each that failed."""
    results = setting.folder / "tests.xml"
    # After a minute, a test that hangs prints where.
    command = ["-m", "pytest", "-v", "-p", "no:randomly", "-o", "faulthandler_timeout=60", "-m", "gpu"]
    command += [f"--junitxml={results}", "-k", "not vit_b"]  # whose kernels are another part
    if not setting.tiny and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(min(_PROCESSES, available_cpus()))]
    if setting.tiny:
        command += ["tests/masks/test_raster_triton.py"]
    done = setting.run("pytest", *command, cwd=Path(__file__).parents[2])
    recorded(results, done.returncode, setting, record)


def recorded(results: Path, code: int, setting: Setting, record: Record) -> None:
    """Record the tests of a results file of pytest."""
    cases = list(ElementTree.parse(results).iter("testcase"))
    for case in cases:
        for problem in (*case.iter("failure"), *case.iter("error")):
            record.check(
                f"{case.get('classname')}::{case.get('name')}", False, problem.get("message", "")[:200]
            )
    skipped = [case for case in cases if case.find("skipped") is not None]
    reasons = {case.find("skipped").get("message", "") for case in skipped}
    record.figure("tests", len(cases))
    record.figure("tests that were skipped", len(skipped))
    record.check("tests were found", cases, f"exit code {code}")
    record.check("pytest ended well", code == 0, f"exit code {code}")
    if setting.on_gpu:
        record.check("tests ran on the GPU", len(skipped) < len(cases), "; ".join(sorted(reasons)))
