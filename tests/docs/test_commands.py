"""The page of the commands has each of them, with its exit codes, and on the site with its arguments."""

import re
from types import SimpleNamespace

import pytest

from sa1b import console
from sa1b.verbs import in_order, module_of
from tests.docs.generated import codes_of_help
from tools import commands


@pytest.mark.parametrize("verb", in_order())
def test_a_command_has_its_codes_and_the_site_its_flags(verb: str) -> None:
    assert {"0", "2", "130"} <= codes_of_help(verb).keys()
    shown = re.findall(r"^\| `(--[\w.-]+)", commands.section(verb), re.MULTILINE)
    if verb == "train":
        assert {"--preset", "--data.root", "--parallel.mode", "--logging.every"} <= set(shown)
    else:
        assert sorted(shown) == sorted({*console._flags(module_of(verb).main)} - {"--arguments"})


def test_only_the_page_of_the_commands_has_their_sections() -> None:
    pages = [SimpleNamespace(file=SimpleNamespace(src_uri=name)) for name in ("index.md", "commands.md")]
    texts = [commands.on_page_markdown("# Title", page=page) for page in pages]
    assert texts[0] == "# Title"
    assert texts[1].startswith("# Title\n")
    assert re.findall("^## sa1b (.*)$", texts[1], re.MULTILINE) == in_order()
