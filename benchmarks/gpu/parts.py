"""All parts, in the order in which they run: the most important first, in case the time runs out."""

from benchmarks.gpu.part import Part

SECONDS = 530.0  # of all parts together: ten seconds less than nine minutes


def _checks(name: str, work: str, seconds: float, what: str, *needs: str) -> Part:
    """A part that measures no times and runs at the same time as others."""
    return Part(name, f"benchmarks.gpu.{work}", seconds, what, needs, measures=False)


def _measures(name: str, work: str, seconds: float, what: str, *needs: str) -> Part:
    return Part(name, f"benchmarks.gpu.{work}", seconds, what, needs)


PARTS = (
    _measures("machine", "machine:work", 40, "versions; rates of memory, copies and matrix products"),
    _measures("material", "material:work", 100, "datasets of synthetic images for the other parts"),
    _checks("tests", "cuda_tests:work", 120, "pytest -m gpu"),
    _checks("race", "loader:race", 80, "2,000 batches, a busy default stream, a slow caller", "material"),
    _checks("equal", "loader:equal", 60, "batches on the device equal those on the CPU", "material"),
    _checks("modes", "training:modes", 80, "none, ddp and fsdp compute the same", "material"),
    _checks("commands", "commands:work", 120, "commands that train, evaluate, label and adapt", "material"),
    _checks("failure", "training:failure", 60, "a run out of memory ends with its reason", "material"),
    _checks("precision", "training:precision", 80, "tf32, bf16 and fp16 beside fp32", "material"),
    _checks("decoders", "decoders:checks", 80, "pixels of decoders for the GPU; broken files", "material"),
    _checks("decoder-race", "decoders:race", 100, "10,000 decodes leave memory in use alone"),
    _checks("doctor", "doctor:work", 60, "sa1b doctor", "material"),
    _measures("raster", "raster:work", 50, "masks to pixels beside zero_(), with the same bits", "material"),
    _measures("rates", "loader:rates", 75, "images a second; allocations and waits", "material"),
    _measures("kernels", "kernels:attention", 40, "attention by back end: errors and times"),
    _measures("norms", "kernels:norms", 40, "layer norms of few channels and their constants; upscaling"),
    _measures("losses", "kernels:losses", 20, "losses in one pass and by operators of torch"),
    _measures("image-tokens", "attention:image_to_tokens", 110, "attention of tokens and image tokens"),
    _measures("recipe", "training:recipe", 110, "the full recipe of ViT-B: rate, memory, waits", "material"),
    _measures("checkpoint", "training:checkpoint", 120, "stalls of saves; resuming", "material"),
    _measures("steps", "steps:work", 120, "host and device time of a step, by micro-batch", "material"),
    _measures("encoder", "training:encoder", 60, "forward and backward of the image encoder of ViT-B"),
    _measures("attention", "attention:work", 60, "forms of the attention with relative positions"),
    _measures("decoder-rates", "decoder_rates:work", 90, "rates of decoders for the GPU", "material"),
    _measures("compiled", "training:compiled", 110, "the full recipe of ViT-B, compiled", "material"),
    _measures("sweep", "raster:sweep", 60, "the best constants of the raster kernels", "material"),
)
