"""An empty stand-in for torchvision, which does not import beside a CPU build of torch.

MosaicML Streaming imports two names from it, which are not used here.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def install() -> None:
    """Make the names importable if torchvision is missing."""
    if "torchvision" in sys.modules or find_spec("torchvision") is not None:
        return
    # transformers must still find that torchvision is not installed.
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
