"""The package in fresh environments, installed in every order and imported from every folder.

Environments download nothing: their dependencies are links to those of this environment, in a folder named by
a .pth file. The package itself is built and installed by pip as a user would, without its dependencies.
"""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

REPOSITORY = Path(__file__).parents[2]
PARTS = ("sa1b", "tools", "benchmarks", "pyproject.toml", "README.md", "LICENSE")
CACHES = ("__pycache__", "*.egg-info", "results")
WORK = "import numpy, sa1b.hashing; sa1b.hashing.random_words(1, 2, numpy.arange(3))"  # this command compiles a kernel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the packages of this environment, without this package and without .pth files."""
    folder = tmp_path_factory.mktemp("dependencies")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("sa1b", "__editable__")) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone under its usual name, in a folder of projects."""
    folder = tmp_path / "projects" / "sa1b"
    folder.mkdir(parents=True)
    for name in PARTS:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns(*CACHES))
        elif (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, folder)
    return folder


class Environment:
    """A virtual environment; its commands run without the variables of this process that change imports."""

    def __init__(self, folder: Path, dependencies: Path, cache: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder = folder
        (self.packages,) = folder.glob("lib/python*/site-packages")
        (self.packages / "dependencies.pth").write_text(f"{dependencies}\n")
        self.variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NUMBA"))}
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.variables |= {"PATH": path, "XDG_CACHE_HOME": str(cache)}

    def run(self, *words: object, cwd: Path) -> str:
        command = [str(self.folder / "bin" / str(words[0])), *map(str, words[1:])]
        done = subprocess.run(
            command, cwd=cwd, env=self.variables, capture_output=True, text=True, check=False, timeout=600
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def install(self, *words: object) -> None:
        self.run(
            "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
            "--disable-pip-version-check", *words, cwd=self.folder,
        )  # fmt: skip

    def uninstall(self) -> None:
        self.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "sa1b", cwd=self.folder)

    def module(self, cwd: Path) -> Path:
        """The path from which a notebook in this folder imports sa1b."""
        code = "import sa1b; sa1b.open; print(sa1b.__file__)"
        return Path(self.run("python", "-c", code, cwd=cwd).strip()).parent

    def remains(self) -> list[str]:
        return [path.name for path in self.packages.iterdir() if "sa1b" in path.name]


@pytest.fixture
def environment(tmp_path: Path, dependencies: Path) -> Environment:
    return Environment(tmp_path / "environment", dependencies, tmp_path / "cache")


@pytest.mark.parametrize(
    "order", [("wheel",), ("editable",), ("wheel", "editable"), ("editable", "wheel")], ids="-".join
)
def test_the_last_installation_is_found_from_everywhere_and_leaves_nothing(
    order: tuple[str, ...], environment: Environment, clone: Path, tmp_path: Path
) -> None:
    for way in order:
        environment.install(*(["--editable"] if way == "editable" else []), clone)
        environment.run("python", "-c", WORK, cwd=tmp_path)  # the kernels are cached now
    installed = clone / "sa1b" if order[-1] == "editable" else environment.packages / "sa1b"
    assert environment.module(tmp_path) == installed
    assert environment.module(clone.parent) == installed  # a folder that also contains a folder sa1b
    assert environment.module(clone) == clone / "sa1b"
    for cwd in (tmp_path, clone.parent, clone):
        assert environment.run("sa1b", "--version", cwd=cwd).startswith("sa1b ")
        assert environment.run("python", "-m", "sa1b", "--version", cwd=cwd).startswith("sa1b ")
    advice = "from sa1b.console import command; print(command('verify'))"
    assert environment.run("python", "-c", advice, cwd=tmp_path) == "sa1b verify\n"
    environment.uninstall()
    assert environment.remains() == []
    assert not (environment.folder / "bin" / "sa1b").exists()


def test_what_an_older_version_left_behind_does_not_hide_an_editable_install(
    environment: Environment, clone: Path, tmp_path: Path
) -> None:
    # numba's files beside the source would remain after `pip uninstall`.
    left = environment.packages / "sa1b" / "__pycache__"
    left.mkdir(parents=True)
    (left / "hashing._mix_loop-56.py311.nbi").write_bytes(b"x")
    environment.install("--editable", clone)
    for cwd in (tmp_path, clone.parent, clone):
        assert environment.module(cwd) == clone / "sa1b"


def test_a_wheel_has_the_whole_package_and_nothing_else(
    environment: Environment, clone: Path, tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    words = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", wheels)
    environment.run("python", "-m", "pip", *words, clone, cwd=tmp_path)
    (wheel,) = wheels.iterdir()
    names = set(ZipFile(wheel).namelist())
    kept = {
        path.relative_to(clone).as_posix()
        for path in (clone / "sa1b").rglob("*")
        if path.suffix in (".py", ".html", ".typed")
    }
    assert {name for name in names if ".dist-info/" not in name} == kept
    assert "sa1b/py.typed" in kept
    # The commands from source tars to a page work with it, in a folder outside of the clone.
    environment.install(wheel)
    folder = tmp_path / "work"
    folder.mkdir()
    for line in (
        "sa1b synthesize downloads --tars 1 --images-per-tar 3 --long-side 160 --workers 1",
        "sa1b reshard downloads --out shards",
        "sa1b verify shards --deep",
        "sa1b gallery shards",
    ):
        environment.run(*line.split(), cwd=folder)
    assert (folder / "gallery.html").stat().st_size > 10_000
    code = (
        "import importlib.util as u; print([n for n in ('tools', 'tests', 'benchmarks') if u.find_spec(n)])"
    )
    assert environment.run("python", "-c", code, cwd=folder).strip() == "[]"
