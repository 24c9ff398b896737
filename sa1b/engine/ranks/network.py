"""Settings of NCCL and gloo for ranks on several machines: environment variables, each with its reason.

    connection = choose("auto", gpus=True, out=Path("run"))    # before the process group starts
    connection.apply()
    print(connection)

A variable that is set already, in the environment or in a configuration file of NCCL, is kept. On one machine
only NCCL's record of collectives is set up; gloo has no such record. Variables are used as the documentation
of NCCL 2.30 and of torch.distributed describes them:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html,
https://docs.pytorch.org/docs/stable/distributed.html. If the documentation recommends NCCL's own choice, the
variable is listed, but not set.
"""

import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sa1b.errors import UsageError

Network = Literal["auto", "ethernet", "infiniband"]

# Interfaces that lead to no other machine. The interface of a container and a bond are virtual devices too,
# so the kind of the device is no criterion.
_INTERNAL = re.compile(
    r"lo$|docker|podman|br-|virbr|veth|vnet|tun|tap|cni|flannel|cali|kube|lxc|lxd|dummy|ifb|vmnet"
)
_FAST = 100_000  # Mbit/s
_CLOUDS = ("0x1d0f", "0x1ae0")  # network devices of Amazon and Google, for which NCCL has its own numbers
_SAME = {  # older names of variables
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """An environment variable."""

    variable: str
    value: str | None  # None: the variable is not set, or is kept
    reason: str  # why it is set, or the value that it keeps


@dataclass(frozen=True, slots=True)
class NetworkChoice:
    """How the ranks are connected; its text is printed by --dry-run. `title`: the network and why."""

    title: str
    settings: tuple[Setting, ...] = ()

    def apply(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Set the variables, by default for this process."""
        for setting in self.settings:
            if setting.value is not None:
                environment[setting.variable] = setting.value

    def __str__(self) -> str:
        lines = [f"network       {self.title}"]
        for setting in self.settings:
            value = "" if setting.value is None else f"{setting.value}  "
            lines.append(f"  {setting.variable}  {value}({setting.reason})")
        return "\n".join(lines)


def choose(
    kind: Network,
    *,
    gpus: bool,
    out: Path,
    environment: MutableMapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> NetworkChoice:
    """The settings for the ranks of this machine.

    Args:
        kind: auto: InfiniBand if this machine has an active port, else Ethernet; UsageError if it is
            requested without one.
        gpus: the ranks use GPUs and NCCL, not only gloo.
        out: folder of the run, to which torch writes the recorded collectives after a timeout.
        environment: variables of this process, among them those of torchrun.
        root: folder in which /sys, /proc and /etc are mounted.
    """
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if world_size > 1:
        _check_interface(environment.get("GLOO_SOCKET_IFNAME", ""), root)
    variables = {**configured(environment, root), **environment}
    if int(environment.get("LOCAL_WORLD_SIZE", world_size)) >= world_size:
        if not gpus or world_size == 1:
            return NetworkChoice("one machine: nothing is set")
        return NetworkChoice("one machine", tuple(_kept(setting, variables) for setting in _recorder(out)))
    ports = active_ports(root)
    if kind == "infiniband" and not ports:
        raise UsageError(
            f"--parallel.network infiniband: {socket.gethostname()} has no active port in "
            "/sys/class/infiniband; check the driver and the cable, or pass ethernet"
        )
    # The user may request RDMA over Ethernet; with auto, NCCL chooses.
    infiniband = [port for port, layer in ports.items() if layer == "InfiniBand" or kind == "infiniband"]
    if kind == "ethernet":
        infiniband = []
    wanted = [*_sockets(environment.get("MASTER_ADDR", ""), gpus, bool(infiniband), root)]
    if gpus:
        wanted += _infiniband(infiniband) if infiniband else _ethernet(kind)
        wanted += _recorder(out)
        wanted += [
            Setting("NCCL_BUFFSIZE", None, "not set: NCCL's 4 MiB; no other size is better in general")
        ]
    kept = (_kept(setting, variables) for setting in wanted)
    how = "demanded" if kind != "auto" else "a port is active" if infiniband else "no active InfiniBand port"
    return NetworkChoice(f"{'infiniband' if infiniband else 'ethernet'} ({how})", tuple(kept))


def _check_interface(wanted: str, root: Path) -> None:
    existing = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    if existing and any(name and name not in existing for name in wanted.split(",")):
        raise UsageError(
            f"GLOO_SOCKET_IFNAME={wanted}: no such interface on {socket.gethostname()}, which has "
            f"{', '.join(existing)}; name one of them, or unset the variable: --parallel.network chooses one"
        )


def _recorder(out: Path) -> Iterator[Setting]:
    yield Setting(
        "TORCH_FR_BUFFER_SIZE", "2000", "torch records this number of collectives on each rank, with stacks"
    )
    yield Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "and writes them when a collective exceeds its timeout")
    yield Setting(
        "TORCH_FR_DUMP_TEMP_FILE",
        f"{out.absolute()}/collectives-rank-",
        "after a timeout, torch writes the last collectives of each rank where they outlive the node",
    )


def _kept(setting: Setting, variables: MutableMapping[str, str]) -> Setting:
    for name in (setting.variable, _SAME.get(setting.variable)):
        if name is not None and name in variables:
            return Setting(name, None, f"kept: {variables[name]!r} is set already")
    return setting


def _sockets(master: str, gpus: bool, is_infiniband: bool, root: Path) -> Iterator[Setting]:
    name = _interface(master, root)
    if name is None:
        why = f"not set: no interface of this machine leads to {master or 'the first machine'} by its routes"
        yield Setting("GLOO_SOCKET_IFNAME", None, why)
        if gpus:
            yield Setting("NCCL_SOCKET_IFNAME", None, why)
        return
    leads = f"the interface to {master or 'the first machine'}"
    yield Setting("GLOO_SOCKET_IFNAME", name, f"{leads}; gloo would take the address of the host name")
    if not gpus:
        return
    use = "connects the ranks; the data use InfiniBand" if is_infiniband else "no bridge of containers"
    yield Setting("NCCL_SOCKET_IFNAME", f"={name}", f"{leads}: {use}")
    if is_infiniband or _number(root / "sys/class/net" / name / "speed") < _FAST:
        return
    if _text(root / "sys/class/net" / name / "device/vendor") in _CLOUDS:
        yield Setting("NCCL_SOCKET_NTHREADS", None, "not set: NCCL has its own number for this cloud")
        return
    yield Setting("NCCL_SOCKET_NTHREADS", "4", "one thread for each connection cannot fill 100 Gbit/s")
    yield Setting("NCCL_NSOCKS_PERTHREAD", "4", "nor can one socket for each thread")


def _infiniband(ports: list[str]) -> Iterator[Setting]:
    yield Setting(
        "NCCL_IB_HCA", f"={','.join(ports)}", "the active ports, with exact names: mlx5_1 would match mlx5_10"
    )
    yield Setting("NCCL_IB_TIMEOUT", "22", "a link that is lost for up to 2 minutes, not 30 s, ends no run")
    yield Setting("NCCL_IB_RETRY_CNT", None, "not set: NCCL's default, 7, is the maximum")
    yield Setting("NCCL_NET_GDR_LEVEL", None, "not set: NCCL chooses by the distance of adapter and GPU")


def _ethernet(kind: Network) -> Iterator[Setting]:
    if kind == "ethernet":
        yield Setting("NCCL_IB_DISABLE", "1", "sockets were demanded; NCCL would prefer RDMA adapters")


def active_ports(root: Path) -> dict[str, str]:
    """Active ports of RDMA adapters, such as mlx5_0:1 -> their link layer, InfiniBand or Ethernet."""
    folders = sorted((root / "sys/class/infiniband").glob("*/ports/*"), key=_natural)
    return {
        f"{folder.parent.parent.name}:{folder.name}": _text(folder / "link_layer")
        for folder in folders
        if "ACTIVE" in _text(folder / "state")
    }


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _interface(master: str, root: Path) -> str | None:
    """The interface by which this machine reaches the first one; None if that is not clear."""
    names = [
        path.name
        for path in sorted((root / "sys/class/net").glob("*"))
        if not _INTERNAL.match(path.name) and _text(path / "operstate") in ("up", "unknown")
    ]
    routes = [route for route in _routes(root) if route[0] in names]
    address = _address(master)
    if address is not None:
        fitting = [route for route in routes if address & route[2] == route[1]]
    else:
        fitting = [route for route in routes if route[2] == 0]
    if fitting:
        return max(fitting, key=lambda route: (route[2], -route[3]))[0]
    return names[0] if len(names) == 1 else None


def _routes(root: Path) -> Iterator[tuple[str, int, int, int]]:
    for line in _text(root / "proc/net/route").splitlines()[1:]:
        fields = line.split()
        with suppress(IndexError, ValueError, struct.error):
            network, mask = (
                struct.unpack("<I", struct.pack(">I", int(fields[column], 16)))[0] for column in (1, 7)
            )
            yield fields[0], network, mask, int(fields[6])


def _address(host: str) -> int | None:
    """The IPv4 address of a host; None if it is unknown, or an address of this machine for itself."""
    try:
        packed = socket.inet_aton(socket.gethostbyname(host)) if host else b""
    except OSError:
        return None
    return None if not packed or packed[0] in (0, 127) else int.from_bytes(packed, "big")


def configured(environment: Mapping[str, str], root: Path) -> dict[str, str]:
    """The variables in NCCL's configuration files, over which the environment would have priority."""
    user_file = environment.get("NCCL_CONF_FILE") or Path(environment.get("HOME", "/"), ".nccl.conf")
    variables = {}
    for path in (root / "etc/nccl.conf", Path(user_file)):
        for line in _text(path).splitlines():
            name, equals, value = line.strip().partition("=")
            if equals and not name.startswith("#"):
                variables[name.strip()] = value.strip()
    return variables


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else -1
