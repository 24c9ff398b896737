"""A finding for each environment variable that changes how ranks communicate."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from sa1b.engine.ranks.network import active_ports, configured
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding, State
from sa1b.programs.doctor.variables import KNOWN, RULES

_OURS = re.compile(r"(NCCL|TORCH_NCCL|TORCH_FR|GLOO|TORCH_GLOO|TORCH_DISTRIBUTED)_")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_FILES = ("NCCL_CONF_FILE", "NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_TUNER_CONFIG_FILE")
_LEVELS = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")
_NEAR = 0.84  # similarity of a misspelled name to the right one: one or two wrong letters
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def environment(process: RankProcess) -> Iterator[Finding]:
    """One finding for each variable that is set, in the environment or in NCCL's configuration files."""
    files = configured(process.environment, process.system)
    settings = {**files, **process.environment}
    chosen = sorted(name for name in settings if _OURS.match(name) or name in RULES)
    values = {name: settings[name] for name in chosen}
    for name in chosen:
        state, figure, remedy = _checked(name, settings[name].strip(), process)
        where = " (in a configuration file of NCCL)" if name not in process.environment else ""
        text = f"{name}={settings[name]}{where}: {figure}"
        yield Finding("environment", state, text, remedy, values={name: settings[name]})
    if not chosen:
        none = "no variable of NCCL, gloo or torch.distributed is set"
        yield Finding("environment", "ok", none, values=values)
    yield from _rendezvous(process)


def _checked(name: str, value: str, process: RankProcess) -> tuple[State, str, str]:
    """State, figure and remedy of a variable."""
    unset = f"Unset {name}"
    if name in _INTERFACES:
        return _interface(name, value, process)
    if name in _FILES and not Path(value).is_file():
        return "failed", "no such file", f"{unset}, or name a file of this machine"
    if name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA"):
        return _infiniband(name, value, process)
    if name == "NCCL_DEBUG" and value.upper() not in _LEVELS:
        return "warning", f"no level, one of {', '.join(_LEVELS)}", "Set NCCL_DEBUG=WARN"
    if name not in KNOWN:
        return _unknown(name)
    rule = RULES.get(name)
    if rule is None:
        return "ok", "harmless, a setting of NCCL", ""
    if rule.values and value.upper() not in rule.values:
        return "ok", "harmless" if rule.kind != "good" else f"good, {rule.why}", ""
    if rule.kind in ("good", "harmless"):
        return "ok", f"{rule.kind}, {rule.why}", ""
    return "warning", f"{rule.kind}: {rule.why}", rule.instead or unset


def _unknown(name: str) -> tuple[State, str, str]:
    near = difflib.get_close_matches(name, KNOWN, 1, _NEAR)
    if near:
        return "warning", f"no such variable, so it has no effect; the nearest is {near[0]}", f"Set {near[0]}"
    return "ok", "not known to this check", ""


def _interface(name: str, value: str, process: RankProcess) -> tuple[State, str, str]:
    """A list of interfaces: prefixes, after ^ excluded ones, after = exact names; gloo takes exact names."""
    folder = process.system / "sys/class/net"
    existing = sorted(path.name for path in folder.glob("*"))
    if value.startswith("^"):
        return "ok", "good, excludes interfaces", ""
    exact = value.startswith("=") or name.startswith("GLOO")
    prefixes = [prefix for prefix in value.removeprefix("=").split(",") if prefix]
    matching = [
        interface
        for interface in existing
        for prefix in prefixes
        if (
            interface == prefix.partition(":")[0] if exact else interface.startswith(prefix.partition(":")[0])
        )
    ]
    several = process.world_size > process.local_world_size
    if not matching:
        remedy = f"Name an interface of this machine, or unset {name}: --parallel.network chooses one"
        return (
            "failed",
            f"no such interface on {process.host}, which has {', '.join(existing) or 'none'}",
            remedy,
        )
    remedy = f"Name the interface to the other machines, or unset {name}: --parallel.network chooses one"
    if several and all(interface == "lo" for interface in matching):
        return "failed", "lo leads to no other machine", remedy
    internal = [prefix for prefix in matching if prefix.startswith(("docker", "virbr", "veth"))]
    if several and internal:
        return "warning", f"{internal[0]} is of containers and leads to no other machine", remedy
    return "ok", f"good, {', '.join(matching)}", ""


def _infiniband(name: str, value: str, process: RankProcess) -> tuple[State, str, str]:
    ports = active_ports(process.system)
    if name == "NCCL_IB_HCA":
        prefixes = [adapter.partition(":")[0] for adapter in value.lstrip("^=").split(",") if adapter]
        adapters = sorted({port.partition(":")[0] for port in ports})
        matching = [adapter for adapter in adapters if any(adapter.startswith(prefix) for prefix in prefixes)]
        if value.startswith("^") or matching:
            return "ok", f"good, {', '.join(matching) or 'excludes adapters'}", ""
        has = ", ".join(adapters) or "none"
        remedy = "Name adapters of `ibdev2netdev` or /sys/class/infiniband, or unset NCCL_IB_HCA"
        return "failed", f"no such adapter with an active port on {process.host}, which has {has}", remedy
    off = value == "1" if name == "NCCL_IB_DISABLE" else value.lower() == "socket"
    if off and ports:
        why = f"slow: {', '.join(sorted(ports))} of {process.host} is active and not used"
        return "warning", why, f"Unset {name}"
    return "ok", "harmless", ""


def _rendezvous(process: RankProcess) -> Iterator[Finding]:
    """The finding about the rendezvous address, MASTER_ADDR and MASTER_PORT."""
    if process.world_size == 1:
        return
    address, port = (process.environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    remedy = (
        "Start the ranks by torchrun, or set MASTER_ADDR and MASTER_PORT to a free port of the first machine"
    )
    problem = ""
    if not address or not port:
        problem = f"{'MASTER_ADDR' if not address else 'MASTER_PORT'} is not set"
    elif not (port.isdecimal() and 0 < int(port) < 65536):
        problem = f"MASTER_PORT={port} is no port"
    elif address in _LOCAL_NAMES and process.world_size > process.local_world_size:
        problem = f"MASTER_ADDR={address} is each machine itself, but the ranks are on several machines"
    if problem:
        yield Finding("environment", "failed", problem, remedy)
    else:
        yield Finding("environment", "ok", f"MASTER_ADDR={address} MASTER_PORT={port}: good")
