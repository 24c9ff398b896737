"""Convert a checkpoint, or published SAM weights, to one file of weights.

Example: sa1b convert run --out sam.safetensors

The tensors have the published names, so that the original SAM code can load the file and training can start
from it with --init. The command prints the lines of Python that load the file. Exit code 0: written;
2: not written; 130: interrupted.
"""

import json
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from sa1b.console import loading


def main(
    source: Annotated[Positional[Path], tyro.conf.arg(metavar="SOURCE")],
    /,
    out: Path,
    overwrite: bool = False,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Convert a checkpoint, or published SAM weights, to one file of weights.

    The file contains the model, not the optimizer. The command verifies digests and checksums, compares names
    and shapes with the model, and runs no code from the source. A damaged checkpoint is refused. For a run
    folder, the newest undamaged checkpoint is converted.

    Args:
        source: A checkpoint (run/checkpoints/step-00001000), a run folder, or a .pth or .safetensors file
            with SAM weights.
        out: File to write; its ending, .safetensors or .pth, determines the format.
        overwrite: Replace the file if it exists.
        json_output: Print the summary as JSON.
    """
    with loading():
        from sa1b.engine.checkpoint.weights import convert

    converted = convert(source, out, overwrite=overwrite)
    print(json.dumps(converted.document(), indent=1) if json_output else converted.table())
    return 0
