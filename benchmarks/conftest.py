"""Prints, for each group of benchmarks, how many times faster than the group's reference each one is.

The reference of a group is the benchmark that sets `benchmark.extra_info["reference"] = True`.
"""

from collections import defaultdict


def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    groups = defaultdict(list)
    for benchmark in session.benchmarks if session else []:
        if not benchmark.has_error:
            groups[benchmark.group].append(benchmark)
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
