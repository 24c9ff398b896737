"""Shell completion of verbs and their flags: `sa1b --tyro-print-completion bash`, zsh or tcsh.

The script contains all verbs and flags, so that completion imports neither this package nor torch.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path

from sa1b.console import loading, usage_errors
from sa1b.errors import UsageError

SHELLS = ("bash", "zsh", "tcsh")


def main(arguments: Sequence[str], mains: Mapping[str, Callable[..., object] | None]) -> int:
    """Print or write the completion script, according to tyro's two flags.

    Args:
        mains: verb -> the function whose arguments are its flags; None: the settings of training are.

    Raises:
        UsageError: the shell is unknown, or the path is missing.
    """
    import tyro

    flag, *values = arguments
    if not values or values[0] not in SHELLS:
        raise UsageError(f"{flag}: the value must be a shell, one of {', '.join(SHELLS)}")
    if flag.startswith("--tyro-write") and len(values) < 2:
        raise UsageError(f"{flag} {values[0]}: the path is missing; add the path of the file to write")
    with loading():
        from sa1b.recipes.presets import PRESETS
    settings = type(next(iter(PRESETS.values())))
    callables = {verb: function or settings for verb, function in mains.items()}
    only = (tyro.conf.FlagCreatePairsOff,)
    printing = [flag.replace("-write-", "-print-"), values[0]]
    script = io.StringIO()
    with suppress(SystemExit), redirect_stdout(script), usage_errors("sa1b"):
        tyro.extras.subcommand_cli_from_dict(callables, prog="sa1b", args=printing, config=only)
    # Bash completes every line of the output as a word, also the second line of a description.
    lines = [
        line.replace("\\n", " ") if line.startswith("COMPLETION_SPEC") else line
        for line in script.getvalue().splitlines()
    ]
    if flag.startswith("--tyro-write"):
        Path(values[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        print("\n".join(lines))
    return 0
