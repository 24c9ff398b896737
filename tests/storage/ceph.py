"""Ceph's object gateway on one machine, for tests: a real S3 store with signatures, on free ports of 127.0.0.1.

One monitor, one OSD on a sparse file, one gateway, all state in one folder. The daemons run in the
foreground; the kernel ends them when the thread that started them ends.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

INSTALL = "apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
    "setpriv",
)
KEY, SECRET = "TESTKEY", "testsecret"

_SETTINGS = """
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{monitor},v1:127.0.0.1:{monitor1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file =
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
log to stderr = false
mon cluster log to file = false
mon allow pool size one = true
mon data avail warn = 2
mon data avail crit = 1
paxos propose interval = 0.02
paxos min wait = 0.01
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 2
osd pool default pgp num = 2
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd objectstore = bluestore
bluestore block size = 4294967296
osd memory target = 939524096
osd op queue = wpq
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{gateway} tcp_nodelay=1
rgw run sync thread = false
rgw enable ops log = false
rgw thread pool size = 32
{extra}
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Gateway:
    """A running store; use as a context.

    Args:
        extra: lines for the gateway's section of the settings.
    """

    def __init__(self, extra: str = "") -> None:
        # Paths of sockets have a limit of 107 bytes: not pytest's long folder.
        self.folder = Path(tempfile.mkdtemp(prefix="ceph-"))
        self.port = free_port()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        settings = {"fsid": uuid.uuid4(), "folder": self.folder, "gateway": self.port, "extra": extra}
        (self.folder / "conf").write_text(
            _SETTINGS.format(monitor=free_port(), monitor1=free_port(), **settings)
        )
        for name in ("mon", "osd", "rgw"):
            (self.folder / name).mkdir()
        try:
            self._keys()
            self._storage(str(settings["fsid"]))
            self.start_gateway()
            self._call(
                "radosgw-admin", "user", "create", "--uid=t", "--display-name=t",
                f"--access-key={KEY}", f"--secret-key={SECRET}",
            )  # fmt: skip
        except BaseException:
            self.stop()
            raise

    @property
    def options(self) -> dict[str, Any]:
        """For a file system of fsspec."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{self.port}"}

    def start_gateway(self) -> None:
        self._start("radosgw", "-n", "client.rgw.a")
        wait_for(self._answers, "the gateway")

    def kill_gateway(self) -> None:
        """End it as a crash does."""
        daemon = self._daemons.pop("radosgw")
        daemon.kill()
        daemon.wait()

    def stop(self) -> None:
        """End everything and remove the folder."""
        for name in ("radosgw", "ceph-osd", "ceph-mon"):
            daemon = self._daemons.pop(name, None)
            if daemon is None:
                continue
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Gateway":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _keys(self) -> None:
        keyring = self.folder / "keyring"
        everything = {"mon": "allow *", "osd": "allow *", "mgr": "allow *"}
        rights = {
            "mon.": {"mon": "allow *"},
            "client.admin": everything,
            "osd.0": {"mon": "allow profile osd", "mgr": "allow profile osd", "osd": "allow *"},
            "client.rgw.a": {"mon": "allow rw", "osd": "allow rwx"},
        }
        for number, (name, allowed) in enumerate(rights.items()):
            flags = [word for kind, right in allowed.items() for word in ("--cap", kind, right)]
            create = [] if number else ["--create-keyring"]
            self._run("ceph-authtool", str(keyring), *create, "--gen-key", "-n", name, *flags)

    def _storage(self, fsid: str) -> None:
        hosts = next(
            line.partition("= ")[2]
            for line in (self.folder / "conf").read_text().splitlines()
            if line.startswith("mon host")
        )
        map_file, keyring = str(self.folder / "monmap"), str(self.folder / "keyring")
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", hosts, map_file)
        self._call("ceph-mon", "-i", "a", "--mkfs", "--monmap", map_file, "--keyring", keyring)
        self._start("ceph-mon", "-i", "a")
        key = self._run("ceph-authtool", keyring, "-n", "osd.0", "--print-key").strip()
        disk = str(uuid.uuid4())
        self._call("ceph", "osd", "new", disk, "-i", "-", given=json.dumps({"cephx_secret": key}))
        self._call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self._start("ceph-osd", "-i", "0")
        wait_for(lambda: "1 up" in self._call("ceph", "osd", "stat"), "the OSD")

    def _start(self, program: str, *arguments: str) -> None:
        self._daemons[program] = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", program, "-f", "-c", str(self.folder / "conf"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _call(self, program: str, *arguments: str, given: str = "") -> str:
        return self._run(program, "-c", str(self.folder / "conf"), *arguments, given=given)

    def _run(self, *command: str, given: str = "") -> str:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/swift/healthcheck", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(ready: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come up in {seconds:g} s")
        time.sleep(0.05)


def processes_below(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in words:
                found.append(int(entry.name))
    return found
