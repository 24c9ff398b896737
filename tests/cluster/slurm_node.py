"""SLURM on one machine, for tests: munge, slurmctld and one or several slurmd on free ports of 127.0.0.1.

With several nodes, their names are not those of machines: a script must name 127.0.0.1 in their place.

All state is in one folder. The daemons run in the foreground; the kernel ends them when the thread that
started them ends.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scontrol", "setpriv")
_SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmctldPort={controller}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_min_interval=0
JobRequeue=1
MaxArraySize=101
ReturnToService=2
MpiDefault=none
KillWait=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP PriorityTier=1 GraceTime={grace}
PartitionName=first Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=8000 State=UNKNOWN\n"


def missing() -> str | None:
    """Why SLURM cannot run here; None if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"{', '.join(absent)}: not installed"
    return None if os.geteuid() == 0 else "not root"


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Node:
    """A running cluster of one node; use as a context.

    A job of the partition "first" preempts those of the default partition, with so many seconds of `grace`.

    Attributes:
        environment: variables with which the commands of SLURM find this cluster.
        names: the nodes; the name of this machine if there is only one.
    """

    def __init__(self, nodes: int = 1, grace: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sa1b-slurm-"))  # short: sockets have short paths
        self.folder.chmod(0o755)
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        host, cpus = socket.gethostname().partition(".")[0], os.cpu_count()
        self.names = [host] if nodes == 1 else [f"n{number}" for number in range(nodes)]
        settings = _SETTINGS.format(folder=self.folder, host=host, controller=_free_port(), grace=grace)
        for name in self.names:
            settings += _NODE.format(name=name, host=host, port=_free_port(), cpus=cpus)
        (self.folder / "slurm.conf").write_text(settings)
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}
        try:
            key = self.folder / "munge.key"
            subprocess.run(["mungekey", "--create", "--keyfile", str(key)], check=True, env=self.environment)
            self._start(
                "munged", "--foreground", "--force", f"--key-file={key}",
                f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid",
                f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed",
            )  # fmt: skip
            self._wait((self.folder / "munge.socket").exists, "munged")
            self._start("slurmctld", "-D", "-i")
            for name in self.names:
                self._start("slurmd", "-D", "-N", name)
            self._wait(lambda: self._idle() == nodes, "slurmd")
        except BaseException:
            self.stop()
            raise

    def run(self, *words: str, folder: Path) -> str:
        """The output of a command of SLURM."""
        done = subprocess.run(
            words, cwd=folder, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: Path, *options: str) -> str:
        """Submit a script in its folder; return the number of the job."""
        return self.run("sbatch", "--parsable", *options, script.name, folder=script.parent).strip()

    def state(self, job: str) -> str:
        """The states of the tasks of a job, separated by spaces; empty once all have ended."""
        return " ".join(
            self._asked("squeue", "--noheader", "--array", "--format=%T", f"--jobs={job}").split()
        )

    def wait(self, job: str, seconds: float) -> None:
        """Wait until no task of a job is pending or running."""
        self._wait(lambda: not self.state(job), f"job {job}", seconds)

    def exit_codes(self, job: str) -> list[str]:
        """ExitCode of the tasks of a job, as `scontrol` prints it."""
        shown = self._asked("scontrol", "show", "job", job)
        return [word.partition("=")[2] for word in shown.split() if word.startswith("ExitCode=")]

    def task_state(self, task: str) -> str:
        """The state of one task of an array, JOB_INDEX, or of a job."""
        return re.findall(r"JobState=(\w+)", self._asked("scontrol", "show", "job", task, "--oneliner"))[0]

    def start_now(self, job: str) -> None:
        """Let the tasks of a job that were queued again start at once instead of after two minutes."""
        for line in self._asked("scontrol", "show", "job", job, "--oneliner").splitlines():
            if "JobState=PENDING" in line and "Reason=BeginTime" in line:
                number = re.findall(r"^JobId=(\d+)", line)[0]
                self._asked("scontrol", "update", f"JobId={number}", "StartTime=now")

    def stop(self) -> None:
        """End the jobs and the daemons, and remove the folder."""
        if len(self._daemons) == 2 + len(self.names):
            self._asked("scancel", "--user=root")
            deadline = time.monotonic() + 20
            while self._asked("squeue", "--noheader") and time.monotonic() < deadline:
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.send_signal(signal.SIGKILL)
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _idle(self) -> int:
        return int(self._asked("sinfo", "--noheader", "--partition=p", "--states=idle", "--format=%D") or 0)

    def _start(self, *words: str) -> None:
        log = (self.folder / f"{words[0]}.out").open("wb")
        self._daemons.append(
            subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *words], env=self.environment, stdout=log, stderr=log
            )
        )
        log.close()

    def _asked(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        ).stdout

    def _wait(self, ready: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            dead = [one.args for one in self._daemons if one.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(
                    path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.out")
                )
                raise RuntimeError(f"{what}: not ready; ended: {dead}\n{logs}")
            time.sleep(0.1)
