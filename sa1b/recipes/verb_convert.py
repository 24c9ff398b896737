"""Convert a checkpoint, or published SAM weights, to one file of weights, or to the form of another program.

Example: sa1b convert run --out sam.safetensors
         sa1b convert run --to onnx --out sam-onnx

In a .safetensors or .pth the tensors have the published names, so that the original SAM code can load the
file and training can start from it with --init. --to writes a folder. The command prints the lines of Python
that load the result. Exit code 0: written; 2: not written; 130: interrupted.
"""

from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro
from tyro.conf import Positional

from sa1b.arguments import is_url
from sa1b.console import loading
from sa1b.errors import UsageError
from sa1b.report import present
from sa1b.sources.path_arguments import check_here, takes_endpoint

Form = Literal["segment-anything", "transformers", "onnx", "safetensors"]

TOUR = (110, "Training", "write weights as one file", "sa1b convert run --out sam.safetensors")


@takes_endpoint
def main(
    source: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")],
    /,
    out: Path,
    to: Annotated[Form | None, tyro.conf.arg(metavar=f"{{{','.join(get_args(Form))}}}")] = None,
    overwrite: bool = False,
    scratch: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Convert a checkpoint, or published SAM weights, to one file of weights.

    The file contains the model, not the optimizer. The command verifies digests and checksums, compares names
    and shapes with the model, and runs no code from the source. A damaged checkpoint is refused. For a run
    folder, the newest undamaged checkpoint is converted.

    Args:
        source: A checkpoint (run/checkpoints/step-00001000), a run folder, or a .pth or .safetensors file
            with SAM weights; or the URL of one of these.
        out: File to write; its ending, .safetensors or .pth, determines the format. With --to: a new folder.
        to: Form of the folder. segment-anything: model.pth for the original package. transformers: for
            SamModel.from_pretrained of Hugging Face's transformers. onnx: encoder.onnx and decoder.onnx, as
            ONNX runtimes and annotation tools use them, compared with torch if onnxruntime is installed.
            safetensors: model.safetensors for this package. By default one file.
        overwrite: Replace the file, or the files of a folder that this command has written, if it exists.
        scratch: With a URL as SOURCE: local folder for the copy of the checkpoint, which is removed
            afterwards; by default sa1b-USERID in the system's folder for temporary files.
        json_output: Print the summary as JSON.
    """
    with loading():
        from sa1b.recipes.conversion import convert

    check_here("--out", out)
    check_here("--scratch", scratch)
    if scratch is not None and not is_url(source):
        raise UsageError(f"--scratch {scratch}: only for a SOURCE at a URL; omit it")
    converted = convert(source, out, to=to, overwrite=overwrite, scratch=scratch)
    present(converted, json_output)
    return 0
