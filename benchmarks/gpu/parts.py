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
    _measures("kernels", "kernels:work", 120, "each kernel beside torch, in bf16, fp16 and fp32"),
    _checks("presets", "commands:presets", 120, "vit_b, sam2, repvit, grounding, distill", "material"),
    _checks("assemblers", "assemblers:work", 110, "kernels of attention by assembler and tile"),
    _measures("steps", "steps:work", 100, "a step with all, some, no kernels, and its account", "material"),
    _measures("recipe", "training:recipe", 90, "the full recipe: rate, memory, waits", "material"),
    _measures("peers", "peers:work", 70, "the same step with segment_anything and transformers"),
    _measures("encoder", "training:encoder", 60, "the image encoder by micro-batch and form"),
    _measures("loader", "loader:rates", 90, "images a second; allocations and waits", "material"),
    _checks("tests", "cuda_tests:work", 120, "pytest -m gpu"),
    _checks("race", "loader:race", 100, "2,000 batches, a busy default stream, a slow caller", "material"),
    _measures("compiled", "training:compiled", 120, "the image encoder with compiled blocks"),
    _checks("equal", "loader:equal", 60, "batches on the device equal those on the CPU", "material"),
    _checks("modes", "training:modes", 80, "none, ddp and fsdp compute the same", "material"),
    _checks("precision", "training:precision", 80, "tf32, bf16 and fp16 beside fp32", "material"),
    _measures("checkpoint", "training:checkpoint", 100, "stalls of saves; resuming", "material"),
    _measures("decoder-rates", "decoders:rates", 90, "rates of decoders for the GPU", "material"),
    _measures("raster", "raster:work", 50, "masks to pixels beside zero_(), with the same bits", "material"),
    _checks("decoders", "decoders:checks", 80, "pixels of decoders for the GPU; broken files", "material"),
    _checks("decoder-race", "decoders:race", 100, "10,000 decodes leave memory in use alone"),
    _checks("commands", "commands:work", 120, "commands that check, evaluate, label and adapt", "material"),
    _checks("failure", "training:failure", 60, "a run out of memory ends with its reason", "material"),
    _measures("attention", "attention:work", 90, "forms of the attention with relative positions"),
    _measures("image-tokens", "attention:image_to_tokens", 110, "attention of tokens and image tokens"),
)
