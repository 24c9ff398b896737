"""The files beside the code agree with it: license, citation, changelog, metadata, continuous integration."""

import re
import tomllib
from pathlib import Path

import yaml

import sa1b

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_version_and_license_are_the_same_everywhere() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == PROJECT["version"] == sa1b.__version__
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"
    assert "Apache License\n                           Version 2.0" in (REPOSITORY / "LICENSE").read_text()
    assert [author["name"] for author in citation["authors"]] == [
        author["name"] for author in PROJECT["authors"]
    ]


def test_all_addresses_are_of_one_repository() -> None:
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    assert site["repo_url"] == PROJECT["urls"]["Repository"]
    assert site["site_url"] == PROJECT["urls"]["Documentation"]
    for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"):
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        ours = set(re.findall(r"https://github\.com/[\w-]+/sa1b\b", text))
        assert ours <= {site["repo_url"]}, name


def test_continuous_integration_runs_the_same_script_as_here_on_every_supported_python() -> None:
    flow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = flow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    supported = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert job["strategy"]["matrix"]["python"] == supported
    assert (REPOSITORY / ".ci" / "run").stat().st_mode & 0o111
