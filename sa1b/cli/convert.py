"""Turn a checkpoint into one file of weights, or check and convert a published one.

Example: sa1b convert run --out sam.safetensors

The file has the published names: the original SAM code loads it, and training starts from it with --init.
The lines of Python that load it are printed. Exit code 0: written; 2: not written; 130: interrupted.
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
    """Turn a checkpoint into one file of weights, or check and convert a published one.

    Only the model is taken, not the optimizer. Digests and checksums are verified, names and shapes are
    compared with the model's, and no code in the source is run. A damaged checkpoint is refused; of a run,
    the newest good one is taken.

    Args:
        source: A checkpoint (run/checkpoints/step-00001000), a run, or a .pth or .safetensors of a SAM.
        out: File to write: its ending, .safetensors or .pth, decides the format.
        overwrite: Replace the file if it exists.
        json_output: Print the summary as JSON.
    """
    with loading():
        from sa1b.engine.checkpoint.weights import convert

    converted = convert(source, out, overwrite=overwrite)
    print(json.dumps(converted.document(), indent=1) if json_output else converted.table())
    return 0
