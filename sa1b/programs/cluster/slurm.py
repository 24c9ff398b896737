"""Job scripts of SLURM: arrays that convert sources, jobs that check nodes, and training jobs.

A script is plain text with comments, so that a user can read it and adapt it to a site. It contains nothing
of this machine but the command of this installation.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from sa1b.console import command, counted

# The exit code of the last background process. A signal interrupts `wait`, which is then called again.
_WAIT = (
    "while true; do",
    "    signalled='' code=0",
    "    wait $! || code=$?",
    '    [ -n "$signalled" ] || break',
    "done",
)
_MEET = (
    "# The ranks meet on the first node. The port depends on the job, so that two jobs can share a node.",
    # Not with `head`: pipefail would end the script if scontrol cannot write all names of many nodes.
    'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
    r"head=${hosts%%$'\n'*}",
    "port=$((20000 + SLURM_JOB_ID % 12000))  # below the ports that Linux gives to connections",
)
_RECORD = (
    "# The environment, once, for the record.",
    'echo "job $SLURM_JOB_ID, start ${SLURM_RESTART_COUNT:-0}, nodes: $SLURM_JOB_NODELIST"',
    "env | grep -E '^(SLURM_|NCCL_|TORCH_|CUDA_|OMP_|AWS_ENDPOINT|SA1B_)' \\",
    "    | grep -v -i -E 'JWT|TOKEN|SECRET' | sort || true",
)
MAX_ARRAY = 1000  # tasks of an array that most sites allow: MaxArraySize is 1001 by default


@dataclass(frozen=True, slots=True)
class Site:
    """The settings of a job that depend on the site."""

    partition: str | None = None  # as the site names it, like the account; None: its default
    account: str | None = None
    # limit of an array task, [days-]hours:minutes:seconds; None: that of the partition
    time: str | None = None
    cpus: int | None = None  # processors of an array task; None: chosen by the kind of job
    memory: str | None = None  # of a node such as "16G"; None: chosen by the kind of job, or of the site
    name: str | None = None
    logs: str = "."  # folder of the log files; it must exist when the job starts
    setup: tuple[str, ...] = ()  # shell commands that come first, such as the activation of an environment
    options: tuple[str, ...] = ()  # further ones of sbatch, such as "--qos=high"
    grace: int = 120  # seconds before the time limit at which SLURM signals the script
    requeue: int = 0  # how often the script queues a failed job again


def reshard_script(
    arguments: Sequence[str], site: Site, *, tasks: int, workers: int, accepted: Sequence[int] = ()
) -> str:
    """The script of an array job that converts sources with `sa1b reshard ARGUMENTS`.

    Array task I of N (`tasks`) has the sources I, I + N, I + 2 N, ..., so that the array is much smaller than
    the number of sources. Every array task ends by `--finish` if no source is left; the last one writes the
    dataset. `workers`: processes of an array task, from `arguments`. `accepted`: exit codes of an array task
    that SLURM shall count as success.
    """
    lines = _head(
        site,
        "sa1b-reshard",
        [
            (
                "array",
                f"0-{tasks - 1}",
                f"task I converts the sources I, I + {tasks}, I + {2 * tasks} and so on",
            ),
            (
                "cpus-per-task",
                site.cpus or 2 * workers,
                f"{counted(workers, 'worker process', 'es')} with two cores each",
            ),
            ("mem", site.memory or f"{workers + 1}G", "a worker process uses up to 600 MB"),
            *([_before_the_limit(site)] if site.requeue else []),
            ("requeue", None, "a task that is preempted, or whose node fails, starts again"),
            ("open-mode", "append", "keeps the log of the first start"),
        ],
        "%x-%A_%a.log",
    )
    words = shlex.join(["reshard", *arguments])
    lines += [
        "",
        "# Finished sources are skipped, so a task that starts again continues its work. The task that ends",
        "# last writes dataset.json. To try failed sources again, submit this script again.",
    ]
    call = f'{command(words)} --task "$SLURM_ARRAY_TASK_ID/{tasks}" --finish'
    if not (accepted or site.requeue):
        return "\n".join([*lines, *_literal(arguments, f"exec {call}")]) + "\n"
    lines += [
        "signalled=''",
        *(["trap 'signalled=yes; kill $! || true' USR1"] if site.requeue else []),
        *_literal(arguments, f"{call} &"),
        *_WAIT,
    ]
    if accepted:
        lines += [
            f"case $code in {'|'.join(map(str, accepted))})",
            '    echo "exit code $code counts as success"',
            "    code=0 ;;",
            "esac",
        ]
    if site.requeue:
        lines += [
            "# A task that failed, was killed or reached its time limit is queued again.",
            f'if [ "$code" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {site.requeue} ]; then',
            '    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"']) + "\n"


def train_script(arguments: Sequence[str], site: Site, *, nodes: int, gpus: int) -> str:
    """The script of a training job, `sa1b train ARGUMENTS`, on one or many nodes.

    Before the time limit, and on preemption, SLURM signals the script. The script passes the signal to the
    ranks. They save a checkpoint after the current step and end, and the job is queued again, unless the run
    has finished: rank 0 then creates the file in SA1B_FINISHED.

    `gpus` is the number of GPUs of a node, and of ranks on it; 0: one rank on a node, without a GPU.
    """
    ranks = max(gpus, 1)
    settings = [
        *_of_nodes(site, nodes, gpus, "one torchrun on each node; it starts the ranks"),
        _before_the_limit(site),
        ("requeue", None, "a job that is preempted, or whose node fails, starts again"),
        ("open-mode", "append", "keeps the log of the first start"),
    ]
    lines = _head(site, "sa1b-train", settings, "%x-%j.log")
    torchrun = [
        "torchrun",
        '--nnodes="$SLURM_NNODES"',
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
        '--rdzv-endpoint="$head:$port"',
        '--log-dir="$ranks"',
        "--redirects=3",
        "--tee=3",
        '-m sa1b.train "$@"',
    ]
    lines += [
        "",
        "command -v torchrun > /dev/null || {",
        "    echo 'error: torchrun is not in PATH; print this script again with --setup COMMAND, such as' \\",
        "        'source venv/bin/activate' >&2",
        "    exit 127",
        "}",
        "",
        *_MEET,
        f'ranks={shlex.quote(site.logs)}/ranks-"$SLURM_JOB_ID"  # a log of each rank',
        'preempted=$ranks/preempted-"${SLURM_RESTART_COUNT:-0}"  # a node creates it when it gets SIGTERM',
        "export head port ranks preempted",
        'export SA1B_FINISHED="$ranks/finished"  # rank 0 creates it after the last step',
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={site.grace}  # seconds from SIGTERM to SIGKILL of the ranks",
        "export OMP_NUM_THREADS=1  # the decoding threads use the cores",
        "",
        *_RECORD,
        "",
        *_literal(arguments, f"set -- {shlex.join(arguments)}"),
        "",
        "# On each node: torchrun, which ignores USR1, and a shell that passes it to the ranks. They save a",
        "# checkpoint after the current step and end with exit code 0. On preemption, SLURM sends SIGTERM to",
        "# all processes of the nodes: the ranks stop as after USR1, and the shell waits for torchrun.",
        *_on_each_node(
            "signalled=''",
            "trap 'signalled=yes; pkill -USR1 -P $!' USR1",
            """trap 'signalled=yes; mkdir -p "$ranks"; touch "$preempted"' TERM""",
            '(trap "" USR1; exec ' + " \\\n    ".join(torchrun) + ") &",
            *_WAIT,
            '[ -e "$preempted" ] || exit "$code"',
        ),
        "",
        "# Before the time limit, the nodes get the signal, but not this script.",
        "stopping='' signalled=''",
        "trap 'stopping=yes signalled=yes",
        '    echo "stop requested: asking the ranks for a checkpoint"',
        """    scancel --signal=USR1 "$SLURM_JOB_ID" || true' USR1""",
        'srun --kill-on-bad-exit=1 bash -c "$node" sa1b "$@" &',
        *_WAIT,
        "# A run that stopped before its last step is queued again, and its next start resumes; not if the",
        "# job was cancelled.",
        '[ ! -e "$preempted" ] || stopping=yes',
        'if [ -n "$stopping" ] && [ "$code" -eq 0 ] && [ ! -e "$SA1B_FINISHED" ]; then',
        '    case $(scontrol show job "$SLURM_JOB_ID") in',
        '    *JobState=RUNNING*) scontrol requeue "$SLURM_JOB_ID" ;;',
        "    esac",
        "fi",
    ]
    if site.requeue:
        lines += [
            "# A run that failed resumes from its newest checkpoint.",
            'if [ "$code" -ne 0 ]; then',
            '    mkdir -p "$ranks"',
            '    echo "$code" >> "$ranks/failures"',
            f'    [ "$(wc -l < "$ranks/failures")" -gt {site.requeue} ] || scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return "\n".join([*lines, 'exit "$code"']) + "\n"


def doctor_script(arguments: Sequence[str], site: Site, *, nodes: int, gpus: int) -> str:
    """The script of a job that checks nodes, `sa1b doctor ARGUMENTS`, with the resources of a training job.

    The ranks are started without torchrun, so that each one reports even if the nodes cannot reach each
    other. `gpus` is as for `train_script`.
    """
    ranks = max(gpus, 1)
    lines = _head(
        site,
        "sa1b-doctor",
        _of_nodes(site, nodes, gpus, "one shell on each node; it starts the ranks"),
        "%x-%j.log",
    )
    lines += [
        "",
        *_MEET,
        'export MASTER_ADDR="$head" MASTER_PORT="$port"',
        "export OMP_NUM_THREADS=1  # as in training",
        "",
        *_RECORD,
        "",
        *_literal(arguments, f"set -- {shlex.join(arguments)}"),
        "",
        "# On each node: the ranks. They are started without torchrun, so that each one reports even if the",
        "# nodes cannot reach each other. Rank 0 prints the table of all.",
        f'export LOCAL_WORLD_SIZE={ranks} WORLD_SIZE="$(({ranks} * SLURM_NNODES))"',
        *_on_each_node(
            "code=0 started=()",
            f"for number in $(seq 0 {ranks - 1}); do",
            f"    LOCAL_RANK=$number RANK=$((SLURM_NODEID * {ranks} + number)) \\",
            f'        {command("doctor")} "$@" &',
            "    started+=($!)",
            "done",
            'for process in "${started[@]}"; do wait "$process" || code=$?; done',
            'exit "$code"',
        ),
        'exec srun --kill-on-bad-exit=0 bash -c "$node" sa1b "$@"',
    ]
    return "\n".join(lines) + "\n"


def _before_the_limit(site: Site) -> tuple[str, object, str | None]:
    return "signal", f"B:USR1@{site.grace}", f"signal this script {site.grace} s before the time limit"


def _on_each_node(*lines: str) -> list[str]:
    """The text of a script for the shell that srun starts on each node, as the variable `node`."""
    return ["node=$(cat <<'NODE'", *lines, "NODE", ")"]


def _literal(arguments: Sequence[str], line: str) -> list[str]:
    """A line with quoted arguments; shellcheck considers a dollar sign in them a mistake."""
    marked = any(sign in argument for argument in arguments for sign in "$`")
    return [*(["# shellcheck disable=SC2016"] if marked else []), line]


def _of_nodes(site: Site, nodes: int, gpus: int, why: str) -> list[tuple[str, object, str | None]]:
    """The options of a job with one task on each node; `why` is the reason for one task."""
    return [
        ("nodes", nodes, None),
        ("ntasks-per-node", 1, why),
        *([("gpus-per-node", gpus, None)] if gpus else []),
        (
            "cpus-per-task",
            site.cpus or 12 * max(gpus, 1),
            "threads that read and decode, for all ranks of a node",
        ),
        *([("mem", site.memory, None)] if site.memory else []),
    ]


def _head(site: Site, name: str, settings: Sequence[tuple[str, object, str | None]], log: str) -> list[str]:
    optional = [("partition", site.partition), ("account", site.account), ("time", site.time)]
    settings_of_job = [
        ("job-name", site.name or name, None),
        *[(flag, value, None) for flag, value in optional if value is not None],
        *settings,
        ("output", f"{site.logs.replace('%', '%%')}/{log}", "this folder must exist when the job starts"),
    ]
    lines = ["#!/bin/bash", "# Submit with: sbatch FILE, in the folder to which relative paths refer."]
    for flag, value, why in settings_of_job:
        if why is not None:
            lines.append(f"# {why[:1].upper()}{why[1:]}.")
        lines.append(f"#SBATCH --{flag}" + ("" if value is None else f"={_quoted(str(value))}"))
    lines += [f"#SBATCH {option}" for option in site.options]
    # Scripts that activate an environment may read variables that are not set.
    lines += ["", "set -eo pipefail", *site.setup, "set -u"]
    return lines


def _quoted(value: str) -> str:
    """The value of an option of sbatch, which splits at spaces and ends at a number sign."""
    return f'"{value}"' if any(sign in value for sign in " #'") else value
