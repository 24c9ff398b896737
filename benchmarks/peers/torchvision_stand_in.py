"""An empty stand-in for torchvision, which does not import beside a CPU build of torch.

MosaicML Streaming names two things of it at import and uses none of them here.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def install() -> None:
    """Make the names importable where torchvision is not there."""
    if "torchvision" in sys.modules or find_spec("torchvision") is not None:
        return
    # transformers asks whether it is there, and must hear that it is not.
    import_module("transformers.tokenization_utils_base")
    import_module("transformers.feature_extraction_utils")
    names = {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": type("VisionDataset", (), {})},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, members in names.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
