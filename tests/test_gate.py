"""Gate tests, which a rewrite may not change, only become more; campaigns that are none yet only become fewer."""

import importlib
import tomllib
from pathlib import Path

import pytest

from tests import gate, size

SETTINGS = tomllib.loads((size.REPOSITORY / "pyproject.toml").read_text())["tool"]["sa1b"]["gate"]
CAMPAIGNS = (gate.TESTS / "campaigns.txt").read_text().splitlines()
TESTS = {name: is_gate for _, name, is_gate in gate.all_tests()}


def test_each_room_has_at_least_as_many_gate_tests_as_before() -> None:
    found = gate.counts()
    assert {room: found[room] for room, least in SETTINGS["least"].items() if found[room] < least} == {}
    assert found.keys() <= SETTINGS["least"].keys(), "python -m tests.gate prints the figures"


def test_campaigns_that_need_a_private_name_are_listed_and_become_fewer() -> None:
    assert len(CAMPAIGNS) <= SETTINGS["campaigns"]
    assert sorted(set(CAMPAIGNS)) == CAMPAIGNS
    assert [name for name in CAMPAIGNS if TESTS.get(name, True)] == [], (
        "a gate test now, or gone: remove the line"
    )


@pytest.mark.parametrize("name", sorted(gate.PUBLIC))
def test_a_public_name_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        pytest.importorskip("transformers") if "transformers" in name else None
        assert hasattr(importlib.import_module(module), attribute)


def test_what_the_package_and_its_reference_name_is_public() -> None:
    import sa1b
    import sa1b.masks

    text = (size.REPOSITORY / "docs" / "api.md").read_text()
    named = {line.partition("::: ")[2].strip() for line in text.splitlines() if line.startswith("::: ")}
    named |= {f"sa1b.{name}" for name in sa1b.__all__} | {f"sa1b.masks.{name}" for name in sa1b.masks.__all__}
    assert named - gate.PUBLIC == set()


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("from sa1b import Stream\ndef test_a(): Stream()", ""),
        ("import sa1b\ndef test_a(): sa1b.stream.plan.ResumeError; sa1b.masks.encode", ""),
        ("from tests import kit\ndef test_a(): kit.run('verify')", ""),
        ("import sys\ndef test_a(): run([sys.executable, '-m', 'sa1b', 'verify'])", ""),
        ("from sa1b.errors import Sa1bError\ndef test_a(): pytest.raises(Sa1bError)", ""),
        ("def test_a(): assert 1", "nothing of the package"),
        ("from sa1b.stream.plan import Plan\ndef test_a(): Plan()", "sa1b.stream.plan.Plan"),
        (
            "from sa1b.stream.plan import Plan\ndef own(): Plan()\ndef test_a(): own()",
            "sa1b.stream.plan.Plan",
        ),
        ("def test_a():\n    from sa1b.stream import plan\n    plan.Plan()", "sa1b.stream.plan.Plan"),
        ("import sa1b\ndef test_a(): sa1b.stream.plan.Plan()", "sa1b.stream.plan.Plan"),
        ("from sa1b.stream.plan import Plan\nONE = Plan(1)\ndef test_a(): ONE", "sa1b.stream.plan.Plan"),
        ("import sa1b\ndef test_a(patch): patch.setattr('sa1b.workers.X', 1)", "sa1b.workers.X"),
        ("from sa1b import Stream\ndef test_a(m): m.setattr(Stream, 'close', 1)", "sa1b.Stream"),
        ("import pytest, sa1b\n@pytest.fixture\ndef one(): sa1b.x.y\ndef test_a(one): sa1b.open", "sa1b.x.y"),
        (
            "import pytest, sa1b\n@pytest.fixture(autouse=True)\ndef one(): sa1b.x.y\ndef test_a(): sa1b.open",
            "sa1b.x.y",
        ),
        ("import sa1b\nclass TestOne:\n    def test_a(self): sa1b.x.y", "sa1b.x.y"),
        ("def test_a(): run('-c', 'from sa1b.stream.plan import Plan')", "sa1b.stream.plan.Plan"),
        ("import sa1b\ndef test_a(): sa1b.open; run('-m', 'tests.train.mishap_rank')", "sa1b.train.lr_at"),
    ],
)
def test_what_a_test_reaches_decides(monkeypatch: pytest.MonkeyPatch, text: str, private: str) -> None:
    monkeypatch.setattr(gate, "_harness", lambda path: ())
    path = gate.TESTS / "test_example.py"  # not written
    monkeypatch.setattr(
        Path, "read_text", lambda one, read=Path.read_text: text if one == path else read(one)
    )
    ((_, found),) = gate.private_names.__wrapped__(path).items()
    assert (private in found) if private else (found == {})
