"""Options and tables of the comparison, and ratios and figures of the other benchmarks.

For each group of pytest-benchmark, the speed of each benchmark relative to the group's reference is printed.
The reference sets `benchmark.extra_info["reference"] = True`.
"""

from collections import defaultdict

import pytest

import sa1b
from sa1b.errors import ManifestError, TableError, check_installed

check_installed()
from benchmarks import parts  # noqa: E402
from sa1b.storage.errors import StorageError  # noqa: E402

TABLES = pytest.StashKey[list[str]]()
FIGURES = pytest.StashKey[dict[str, dict[str, object]]]()
IMAGES, ROUNDS = 24, 3  # files with the results of a machine
QUICK = ("a-1024", "b-1024")  # the questions of `pytest benchmarks/`
LEAST = 8  # images: each of two workers prefetches two batches of two before the measurement


def pytest_addoption(parser):
    group = parser.getgroup(
        "comparison",
        "benchmarks/test_peers.py: this loader beside others, twenty minutes by default on two cores. "
        "Tables at the end, benchmarks/results/<machine>.json and report.html; with other images or rounds "
        "than by default <machine>-own.json",
    )
    group.addoption(
        "--full",
        action="store_true",
        help="all outputs, workers and sizes, most of an hour or more; with the folder benchmarks/, all its "
        "files, several hours",
    )
    group.addoption("--data", metavar="ROOT", help="folder or URL of shards to take images from")
    group.addoption(
        "--images", type=int, default=IMAGES, help=f"images to compare on ({IMAGES}); even, at least {LEAST}"
    )
    group.addoption("--rounds", type=int, default=ROUNDS, help=f"interleaved repetitions ({ROUNDS})")
    recording = parser.getgroup("recording", "figures of the single parts")
    recording.addoption(
        "--record",
        action="store_true",
        help="write the figures into benchmarks/results/<machine>-parts.json, from where "
        "`python -m benchmarks.readme` takes them into the documentation",
    )
    budget = parser.getgroup("time to score", "benchmarks/test_time_to_score.py: two loaders, three seeds")
    budget.addoption("--seconds", type=float, default=300.0, help="of training of each of six runs (300)")
    scale = parser.getgroup("scale", "benchmarks/test_scale.py: steps on a simulated dataset directory")
    scale.addoption("--scale", type=float, default=1.0, help="part of all of SA-1B to simulate (1.0)")


def pytest_configure(config):
    config.stash[TABLES] = []
    config.stash[FIGURES] = {}
    if hasattr(
        config.option, "randomly_reorganize"
    ):  # later benchmarks compare their results with those of earlier ones
        config.option.randomly_reorganize = False
    options = config.option
    if options.images < LEAST or options.images % 2:
        raise pytest.UsageError(f"--images {options.images}: an even number, at least {LEAST}")
    if options.rounds < 1:
        raise pytest.UsageError(f"--rounds {options.rounds}: at least 1")
    if not 0 < options.scale <= 1:
        raise pytest.UsageError(f"--scale {options.scale}: above 0, at most 1")
    if not options.seconds > 0:
        raise pytest.UsageError(f"--seconds {options.seconds}: above 0")
    if options.data is not None:
        try:
            images = len(sa1b.open(options.data))
        except (ManifestError, TableError, StorageError) as error:
            raise pytest.UsageError(f"--data: {error}") from None
        if images < LEAST:
            raise pytest.UsageError(f"--data {options.data}: {images} images; at least {LEAST}")


def pytest_collection_modifyitems(config, items):
    """`pytest benchmarks/` without --full: the loader beside the others, in one round of two questions."""
    if config.option.full or any(".py" in argument for argument in config.args):
        return
    config.option.rounds = 1
    left_out = [item for item in items if not is_quick(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if is_quick(item)]
    files = sorted({item.path.name for item in left_out})
    config.stash[TABLES].append(
        "\nOne round of two questions. `pytest benchmarks/FILE` measures a part in full, --full all of them: "
        + ", ".join(files)
    )


def is_quick(item):
    name, _, case = item.name.partition("[")
    quick = name == "test_comparison" and case.rstrip("]") in QUICK
    return item.path.name == "test_peers.py" and (quick or name == "test_everybody_delivers_the_same_tensors")


@pytest.fixture
def figures(request):
    """The results of this session by measured part; each benchmark adds its results."""
    return request.config.stash[FIGURES]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    groups = defaultdict(list)
    for benchmark in session.benchmarks if session else []:
        if not benchmark.has_error:
            groups[benchmark.group].append(benchmark)
    found = config.stash[FIGURES]
    for group, benchmarks in groups.items():
        for reference in (each for each in benchmarks if each.extra_info.get("reference")):
            found[group] = {
                each.name: {
                    "seconds": each.stats.median,
                    "times_faster": reference.stats.median / each.stats.median,
                }
                for each in benchmarks
            }
    if config.option.record and found:
        config.stash[TABLES].append(f"\n{parts.record(parts.RESULTS, found)}")
    for group, benchmarks in groups.items():
        references = [benchmark for benchmark in benchmarks if benchmark.extra_info.get("reference")]
        for reference in references:
            terminalreporter.section(f"{group}: times faster than {reference.name}", "-")
            for benchmark in benchmarks:
                if benchmark is not reference:
                    ratio = reference.stats.median / benchmark.stats.median
                    terminalreporter.write_line(
                        f"{ratio:8.2f} x  {benchmark.name} ({1e3 * benchmark.stats.median:.3f} ms)"
                    )
    for text in config.stash[TABLES]:
        terminalreporter.write_line(text)
