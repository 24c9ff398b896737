"""The checks of `sa1b doctor` on this machine: those about the GPU and the software do not fail."""

import json
import sys

from benchmarks.gpu.material import roots
from benchmarks.gpu.part import Record, Setting

# What these find depends on the machine only.
OF_THE_MACHINE = ("CPUs", "memory", "shared memory", "open files", "space", "read rate")


def work(setting: Setting, record: Record) -> None:
    """Run the command and record its findings."""
    out = setting.folder / "doctor"
    command = [sys.executable, "-m", "sa1b", "doctor", str(roots(setting)["1024"]), "--out", str(out)]
    # The stand-in shows that the output is read; doctor's own tests run the checks.
    flags = ["--seconds", "0.1", "--only", "versions"] if setting.tiny else ["--seconds", "1"]
    done = setting.start([*command, "--json", *flags], capture_output=True, text=True)
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
