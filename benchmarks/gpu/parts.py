"""All parts, in the order in which they run: the most important first, in case the time runs out."""

from benchmarks.gpu.part import Part

SECONDS = 530.0  # of all parts together: ten seconds less than nine minutes


def _part(name: str, work: str, seconds: float, what: str, *needs: str) -> Part:
    return Part(name, f"benchmarks.gpu.{work}", seconds, what, needs)


PARTS = (
    _part("machine", "machine:work", 40, "versions; rates of memory, copies and matrix products"),
    _part("material", "material:work", 100, "datasets of synthetic images for the other parts"),
    _part("raster", "raster:work", 50, "masks to pixels beside zero_(), with the same bits", "material"),
    _part("tests", "cuda_tests:work", 110, "pytest -m gpu"),
    _part("equal", "loader:equal", 40, "batches on the device equal those on the CPU", "material"),
    _part("race", "loader:race", 50, "2,000 batches, a busy default stream and a slow caller", "material"),
    _part("rates", "loader:rates", 60, "images a second; allocations and waits", "material"),
    _part("sweep", "raster:sweep", 60, "the best constants of the raster kernels", "material"),
)
