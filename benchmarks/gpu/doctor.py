"""The checks of `sa1b doctor` on this machine: no check fails."""

import json
import sys

from benchmarks.gpu.material import roots
from benchmarks.gpu.part import Record, Setting


def work(setting: Setting, record: Record) -> None:
    """Run the command and record its findings; those that failed fail the run."""
    out = setting.folder / "doctor"
    command = [sys.executable, "-m", "sa1b", "doctor", str(roots(setting)["1024"]), "--out", str(out)]
    # The stand-in shows that the output is read; doctor's own tests run the checks.
    flags = ["--seconds", "0.1", "--only", "versions"] if setting.tiny else ["--seconds", "1"]
    done = setting.start([*command, "--json", *flags], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    found = json.loads(done.stdout)["findings"]
    for one in found:
        label = f"{one['check']}: {one['figure']}"
        record.check(label, one["state"] != "failed", one.get("remedy", ""))
        if one["state"] == "warning":
            record.text(f"warning of {one['check']}", f"{one['figure']}: {one.get('remedy', '')}")
    if setting.on_gpu:
        devices = [one for one in found if one["check"] == "device"]
        record.check("the GPU is found", any(one["state"] == "ok" for one in devices), devices)
    record.check("sa1b doctor ended well", done.returncode == 0, f"exit code {done.returncode}")
