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
    _part("decoders", "decoders:checks", 60, "pixels of decoders for the GPU; broken files", "material"),
    _part("decoder-race", "decoders:race", 80, "10,000 decodes leave memory in use alone"),
    _part("decoder-rates", "decoder_rates:work", 90, "images a second of decoders for the GPU", "material"),
    _part("encoder", "training:encoder", 60, "forward and backward of the image encoder of ViT-B"),
    _part("recipe", "training:recipe", 60, "the full recipe of ViT-B: rate, MFU, memory, waits", "material"),
    _part("modes", "training:modes", 50, "none, ddp, zero1 and fsdp compute the same", "material"),
    _part("precision", "training:precision", 40, "tf32, bf16 and fp16 beside fp32", "material"),
    _part("failure", "training:failure", 40, "a run out of memory ends with its reason", "material"),
    _part("checkpoint", "training:checkpoint", 70, "stalls of saves; resuming", "material"),
    _part("compiled", "training:compiled", 110, "the full recipe of ViT-B, compiled", "material"),
    _part("doctor", "doctor:work", 40, "sa1b doctor", "material"),
    _part("sweep", "raster:sweep", 60, "the best constants of the raster kernels", "material"),
)
