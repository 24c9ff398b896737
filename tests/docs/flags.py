"""The commands of a `bash` block that is not run: their verbs, flags and values are valid."""

import functools
import re
import shlex

import tyro

from sa1b import console
from sa1b.engine.config import parse
from sa1b.recipes.presets import PRESETS
from sa1b.verbs import in_order, module_of

SUBVERBS = [verb for verb in in_order() if " " in verb]


def commands_of(code: str) -> list[list[str]]:
    """The words of each simple command; variables have the value 1, comments and redirections are left out."""
    code = re.sub(r"\\\n", " ", code)
    code = re.sub(r"\$\{?\w+\}?|\$\([^)]*\)", "1", code)
    lexer = shlex.shlex(code, posix=True, punctuation_chars="\n;&|()<>")
    lexer.commenters = ""  # shlex would remove the end of the line together with the comment
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    comment = redirected = False
    for word in lexer:
        if set(word) <= set("\n;&|()"):
            comment = comment and "\n" not in word
            if not comment:
                commands.append([])
                redirected = False
        elif comment or word.startswith("#"):
            comment = True
        elif set(word) <= set("<>"):
            redirected = True
        elif not redirected:
            commands[-1].append(word)
    return [command for command in commands if command]


def check_flags(code: str) -> None:
    """Parse each `sa1b VERB ...` and `-m sa1b.train ...` of a block, without running it.

    Raises:
        SystemExit: the verb or a flag does not exist, or the value is invalid.
        Sa1bError: the flags do not fit together.
    """
    for words in commands_of(code):
        if "sa1b.train" in words:
            _check_verb("train", words[words.index("sa1b.train") + 1 :])
        elif "sa1b" in words[:-1] and words[0] not in ("cd", "git", "pip"):
            verb, *arguments = words[words.index("sa1b") + 1 :]
            _check_verb(verb, arguments)


def _check_verb(verb: str, arguments: list[str]) -> None:
    if verb.startswith("-"):
        return
    if verb == "train":
        parse(arguments, None, PRESETS)
        return
    if (both := " ".join([verb, *arguments[:1]])) in SUBVERBS:
        verb, arguments = both, arguments[1:]
    main = module_of(verb).main
    if verb == "plan train":
        parse(console.parse(main, arguments, "sa1b plan train", forwards=True)[1], None, PRESETS, root="all")
        return

    @functools.wraps(main)
    def nothing(*_: object, **__: object) -> int:
        return 0

    tyro.cli(nothing, args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
