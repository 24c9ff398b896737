"""`sa1b doctor` on the datasets of this run, and the comparisons of `sa1b doctor --kernels`, all at once."""

import json
import sys

from benchmarks.gpu.material import roots
from benchmarks.gpu.part import Record, Setting, Skipped
from sa1b.masks.proved import MASKS
from sa1b.sam.kernel_proof import Kind, prove, sizes_of
from sa1b.sam.model import PRESETS

FORMATS = ("bf16", "fp16", "fp32")
# What these find depends on the machine only.
OF_THE_MACHINE = ("CPUs", "memory", "shared memory", "open files", "space", "read rate")


def work(setting: Setting, record: Record) -> None:
    """Run the command and record its findings."""
    # The stand-in shows that the output is read; doctor's own tests run the checks.
    flags = ("--seconds", 0.1, "--only", "versions") if setting.tiny else ("--seconds", 1)
    command = ["-m", "sa1b", "doctor", roots(setting)["1024"], "--out", setting.folder / "doctor", "--json"]
    done = setting.start([sys.executable, *map(str, (*command, *flags))], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    found = json.loads(done.stdout)["findings"]
    for one in found:
        text = f"{one['figure']}. {one['remedy']}".rstrip(". ")
        if one["check"] not in OF_THE_MACHINE:
            record.check(one["check"], one["state"] != "failed", text)
        record.text(f"{one['check']}, {one['state']}", text)
    if setting.on_gpu:
        devices = [one for one in found if one["check"] == "device"]
        record.check("the GPU is found", any(one["state"] == "ok" for one in devices), devices)
    record.check("sa1b doctor ended", done.returncode in (0, 1), f"exit code {done.returncode}")


def kernels(setting: Setting, record: Record) -> None:
    """Compare each kernel with torch in all number formats at once; training uses those that are right."""
    if not setting.on_gpu:
        raise Skipped("no GPU")
    kinds = [Kind(MASKS, ()), *(Kind(name, sizes_of(PRESETS["vit_b"])) for name in FORMATS)]
    results = prove(kinds, {}, limits=(80, 40))
    for kind in kinds:
        for name, result in kind.found(results).items():
            one = f"{kind.number_format}, {'together' if '+' in name else name}"
            record.check(one, result["right"], result["why"])
            record.text(one, json.dumps(result))
