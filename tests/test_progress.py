"""The progress bar: one form for all commands."""

import io

from sa1b import report


def shown(monkeypatch, quiet, delay=0.0, unit="B"):
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with report.bar(3_000_000, "work", unit, quiet, delay=delay) as bar:
        bar.update(3_000_000)
    return out.getvalue()


def test_bytes_have_prefixes_other_units_do_not(monkeypatch):
    assert "3.00M/3.00M" in shown(monkeypatch, False)
    assert "3000000/3000000" in shown(monkeypatch, False, unit="shard")


def test_quiet_and_not_yet_due_show_nothing(monkeypatch):
    assert shown(monkeypatch, True) == ""
    assert shown(monkeypatch, False, delay=1000) == ""
