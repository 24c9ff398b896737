"""A finding for each environment variable that changes how ranks communicate.

The sources of the rules are the documentation of NCCL 2.30
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), which states about its section Debugging
that these variables should not be used in production, and of torch 2.13
(https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html).
"""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from sa1b.engine.ranks.network import active_ports, configured
from sa1b.programs.doctor.check import RankProcess
from sa1b.programs.doctor.report import Finding, State

Kind = Literal["good", "harmless", "slow", "risky", "old"]


class Rule(NamedTuple):
    """The effect of a variable."""

    # good: helps; harmless: costs nothing in general; slow: costs speed; risky: may hang or fail; old: has no
    # effect any more, or another name
    kind: Kind
    why: str  # after "NAME=VALUE: "
    values: tuple[str, ...] = ()  # that the kind applies to; empty: all. Other values are harmless
    instead: str = ""  # the remedy; by default: unset the variable


_ON = ("1",)
_OFF = ("0",)
_TUNED = Rule("harmless", "forced; NCCL's own choice is the best one in general")
_DEBUGGING = "for debugging only"


def _renamed(name: str) -> Rule:
    return Rule("old", f"an old name of {name}", (), f"Set {name} instead")


RULES: dict[str, Rule] = {
    "NCCL_DEBUG": Rule(
        "slow", f"writes lines for every call, {_DEBUGGING}", ("TRACE",), "Set NCCL_DEBUG=WARN"
    ),
    "NCCL_DEBUG_SUBSYS": Rule("harmless", "only with NCCL_DEBUG=INFO or TRACE"),
    "NCCL_DEBUG_FILE": Rule("good", "keeps the messages of each rank apart"),
    "NCCL_P2P_DISABLE": Rule("slow", f"GPUs of a machine exchange through host memory; {_DEBUGGING}", _ON),
    "NCCL_P2P_DIRECT_DISABLE": Rule("slow", f"no direct access between GPUs; {_DEBUGGING}", _ON),
    "NCCL_P2P_LEVEL": Rule("slow", "no direct exchange between GPUs of a machine", ("LOC", "0")),
    "NCCL_SHM_DISABLE": Rule("slow", f"ranks of a machine exchange through the network; {_DEBUGGING}", _ON),
    "NCCL_NET_DISABLE_INTRA": Rule("harmless", "no network between ranks of a machine"),
    "NCCL_ALGO": Rule("slow", "forces an algorithm for all sizes, or fails where it does not exist"),
    "NCCL_PROTO": Rule(
        "slow", "forces a protocol for all sizes; LL128 corrupts data where it is not supported"
    ),
    "NCCL_NVLS_ENABLE": Rule("slow", "no reduction in the NVLink switch", _OFF),
    "NCCL_CUMEM_ENABLE": Rule("harmless", "a way to allocate buffers"),
    "NCCL_LAUNCH_MODE": Rule("harmless", "for one process with several GPUs"),
    "NCCL_CHECK_POINTERS": Rule("slow", f"checks the pointers of every call, {_DEBUGGING}", _ON),
    "NCCL_CHECK_MODE": Rule("slow", f"compares the arguments of the ranks, {_DEBUGGING}", ("DEBUG_GLOBAL",)),
    "NCCL_IGNORE_CPU_AFFINITY": Rule("harmless", "NCCL's threads may leave the CPUs of the rank"),
    "NCCL_IB_TIMEOUT": Rule("good", "how long a lost link is tolerated"),
    "NCCL_IB_RETRY_CNT": Rule("good", "how often a lost packet is repeated"),
    "NCCL_IB_GID_INDEX": Rule("harmless", "needed by some RoCE networks, wrong on others"),
    "NCCL_IB_PCI_RELAXED_ORDERING": Rule("slow", "slow in virtual machines", _OFF),
    "NCCL_NET_GDR_LEVEL": Rule("slow", "no GPUDirect RDMA: data pass through host memory", ("LOC", "0")),
    "NCCL_DMABUF_ENABLE": Rule("slow", "no GPUDirect RDMA where nvidia-peermem is not loaded", _OFF),
    "NCCL_PXN_DISABLE": Rule("slow", "GPUs do not use the network adapters of others", _ON),
    "NCCL_RAS_ENABLE": Rule("risky", "the state of a hanging job cannot be queried", _OFF),
    "NCCL_RAS_ADDR": Rule("good", "the address at which the state of a hanging job can be queried"),
    "NCCL_COMM_ID": Rule("risky", "all communicators connect at one fixed address"),
    "NCCL_COMM_BLOCKING": Rule("harmless", "torch chooses it itself"),
    "NCCL_SOCKET_FAMILY": Rule("harmless", "IPv4 or IPv6"),
    "NCCL_SOCKET_NTHREADS": Rule("good", "threads for each connection, for networks of 100 Gbit/s"),
    "NCCL_NSOCKS_PERTHREAD": Rule("good", "sockets for each thread, for networks of 100 Gbit/s"),
    "NCCL_BUFFSIZE": _TUNED,
    "NCCL_NTHREADS": _TUNED,
    "NCCL_MIN_NCHANNELS": _TUNED,
    "NCCL_MAX_NCHANNELS": _TUNED,
    "NCCL_MIN_CTAS": _TUNED,
    "NCCL_MAX_CTAS": _TUNED,
    "NCCL_CROSS_NIC": _TUNED,
    "NCCL_COLLNET_ENABLE": _TUNED,
    "NCCL_CHECKS_DISABLE": Rule("old", "replaced by NCCL_CHECK_POINTERS"),
    "NCCL_RINGS": Rule("old", "no longer read"),
    "NCCL_LL_THRESHOLD": Rule("old", "no longer read"),
    "NCCL_TREE_THRESHOLD": Rule("old", "no longer read"),
    "NCCL_SINGLE_RING_THRESHOLD": Rule("old", "no longer read"),
    "NCCL_IB_CUDA_SUPPORT": Rule("old", "no longer read", (), "Set NCCL_NET_GDR_LEVEL instead"),
    "NCCL_IB_GDR_LEVEL": _renamed("NCCL_NET_GDR_LEVEL"),
    "NCCL_NET_SHARED_BUFFERS": _TUNED,
    "NCCL_BLOCKING_WAIT": _renamed("TORCH_NCCL_BLOCKING_WAIT"),
    "NCCL_ASYNC_ERROR_HANDLING": _renamed("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    "NCCL_DESYNC_DEBUG": _renamed("TORCH_NCCL_DESYNC_DEBUG"),
    "NCCL_ENABLE_TIMING": _renamed("TORCH_NCCL_ENABLE_TIMING"),
    "TORCH_NCCL_BLOCKING_WAIT": Rule("slow", "the processor waits for every collective", _ON),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": Rule("risky", "a rank that loses another one waits forever", _OFF),
    "TORCH_NCCL_ENABLE_MONITORING": Rule("risky", "a stuck watchdog ends no run", _OFF),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": Rule("harmless", "when a stuck watchdog ends the run"),
    "TORCH_NCCL_ENABLE_TIMING": Rule("slow", f"events around every collective, {_DEBUGGING}", _ON),
    "TORCH_NCCL_DESYNC_DEBUG": Rule("slow", f"records every collective in the store, {_DEBUGGING}", _ON),
    "TORCH_NCCL_HIGH_PRIORITY": Rule("harmless", "priority of NCCL's stream"),
    "TORCH_NCCL_TRACE_BUFFER_SIZE": Rule("risky", "after a timeout nothing is recorded", _OFF),
    "TORCH_FR_BUFFER_SIZE": Rule("risky", "after a timeout nothing is recorded", _OFF),
    "TORCH_NCCL_TRACE_CPP_STACK": Rule("slow", f"a stack for every collective, {_DEBUGGING}", _ON),
    "TORCH_FR_CPP_STACK": Rule("slow", f"a stack for every collective, {_DEBUGGING}", _ON),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": Rule("risky", "after a timeout nothing is written", _OFF),
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": Rule("good", "where the last collectives are written after a timeout"),
    "TORCH_FR_DUMP_TEMP_FILE": Rule("good", "where the last collectives are written after a timeout"),
    "TORCH_NCCL_AVOID_RECORD_STREAMS": Rule("harmless", "how memory of collectives is kept"),
    "TORCH_NCCL_CUDA_EVENT_CACHE": Rule("harmless", "reuse of events"),
    "TORCH_NCCL_NAN_CHECK": Rule("slow", f"looks for NaN before every collective, {_DEBUGGING}", _ON),
    "TORCH_DISTRIBUTED_DEBUG": Rule(
        "slow",
        f"compares the ranks before every collective, {_DEBUGGING}",
        ("DETAIL",),
        "Unset it, or set INFO",
    ),
    "TORCH_GLOO_LAZY_INIT": Rule("harmless", "gloo connects two ranks at their first exchange", _ON),
    "GLOO_DEVICE_TRANSPORT": Rule("harmless", "transport of gloo"),
    "GLOO_LOG_LEVEL": Rule("harmless", "messages of gloo"),
    "CUDA_LAUNCH_BLOCKING": Rule("slow", f"the processor waits for every kernel, {_DEBUGGING}", _ON),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": Rule("slow", f"allocates memory at every use, {_DEBUGGING}"),
    "NVIDIA_TF32_OVERRIDE": Rule("slow", "no TF32: matrix products take several times as long", _OFF),
    "NUMBA_DISABLE_JIT": Rule("slow", "masks are 10 to 100 times slower without compiled kernels", _ON),
}

# Further variables of NCCL, so that a misspelled one is recognised. After NCCL_.
OTHERS = """
ALLGATHERV_ENABLE ALLOC_P2P_NET_LL_BUFFERS CGA_CLUSTER_SIZE CHUNK_SIZE COLLNET_NODE_THRESHOLD CONF_FILE
CONNECT_ROUND_MAX_PEERS CTA_POLICY CUMEM_HOST_ENABLE COMM_SHRINK_SHARE_RESOURCES COMM_SPLIT_SHARE_RESOURCES
DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS ENV_PLUGIN GDRCOPY_ENABLE GDR_FLUSH_DISABLE GIN_ENABLE GIN_TYPE
GRAPH_DUMP_FILE GRAPH_FILE GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID IBVERBS_LIB IB_ADAPTIVE_ROUTING
IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_DATA_DIRECT IB_DISABLE IB_ECE_ENABLE IB_FIFO_TC IB_HCA
IB_MERGE_NICS IB_MERGE_VFS IB_PKEY IB_QPS_PER_CONNECTION IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL
IB_SPLIT_DATA_ON_QPS IB_TC IB_USE_INLINE IB_WARN_RAIL_LOCAL IGNORE_COLLNET_MISMATCH IGNORE_DISABLED_P2P
IGNORE_NET_MISMATCH L1_SHARED_MEMORY_CARVEOUT LAUNCH_ORDER_IMPLICIT LL128_BUFFSIZE LL128_NTHREADS LL_BUFFSIZE
LOCAL_REGISTER MAX_NRINGS MAX_P2P_NCHANNELS MEM_SYNC_DOMAIN MIN_NRINGS MIN_P2P_NCHANNELS MNNVL_CLIQUE_ID
MNNVL_ENABLE MNNVL_UUID NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY NET_FORCE_FLUSH NET_GDR_C2C NET_GDR_READ
NET_MERGE_LEVEL NET_OVERHEAD NET_PLUGIN NET_SHARED_COMMS NVB_DISABLE NVB_PRECONNECT NVLS_CHUNKSIZE
NVLS_NCHANNELS NVTX_DISABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE
P2P_NVL_CHUNKSIZE P2P_PCI_CHUNKSIZE P2P_PXN_LEVEL P2P_READ_ENABLE P2P_USE_CUDA_MEMCPY PAT_ENABLE
PROFILER_PLUGIN PROXY_CPUSET PXN_C2C RAS_TIMEOUT_FACTOR REPORT_CONNECT_PROGRESS RUNTIME_CONNECT
SET_STACK_SIZE SET_THREAD_NAME SHM_LOCALITY SHM_USE_CUDA_MEMCPY SINGLE_PROC_MEM_REG_ENABLE SOCKET_IFNAME
SOCKET_INLINE SOCKET_POLL_TIMEOUT_MSEC SOCKET_RCVBUF SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SOCKET_SNDBUF
SYM_KERNEL THREAD_THRESHOLDS TOPO_DUMP_FILE TOPO_FILE TUNER_CONFIG_FILE TUNER_PLUGIN UID_STAGGER_RATE
UID_STAGGER_THRESHOLD WIN_ENABLE WIN_STRIDE WORK_ARGS_BYTES WORK_FIFO_BYTES
"""
KNOWN = {*RULES, *(f"NCCL_{name}" for name in OTHERS.split()), "GLOO_SOCKET_IFNAME"}


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
