"""Environment variables of NCCL, torch.distributed and gloo: the effect of each on training, if it is set.

The sources are the documentation of NCCL 2.30
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html), which states about its section Debugging
that these variables should not be used in production, and of torch 2.13
(https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html).
"""

from typing import Literal, NamedTuple

Kind = Literal["good", "harmless", "slow", "risky", "old"]


class Rule(NamedTuple):
    """The effect of a variable.

    Attributes:
        kind: good: helps. harmless: a choice that costs nothing in general. slow: costs speed. risky: may
            hang or fail. old: has no effect any more, or another name.
        why: after "NAME=VALUE: ".
        values: the values that the kind applies to; empty: all. Other values are harmless.
        instead: the remedy; by default: unset the variable.
    """

    kind: Kind
    why: str
    values: tuple[str, ...] = ()
    instead: str = ""


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
