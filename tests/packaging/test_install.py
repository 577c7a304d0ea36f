"""The package as users get it: from a wheel, editable, from a checkout, and where no compiler is."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("autofuse", "autofuse.passes", "autofuse.lowering", "autofuse.native_kernels")
PACKAGES = (*ROOMS, "autofuse.lowering.gpu", "autofuse.native_kernels.triton", "autofuse.native_kernels.cuda")
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", "build", "dist", "*.egg-info", "*.so", "__pycache__"
)

PROBE = f"""
import importlib.util, json, sys, torch
from torch._dynamo import list_backends
by_entry_point = "autofuse" in list_backends()
enabled = "autofuse.enabling" in sys.modules and sys.modules["autofuse.enabling"].enabled() is not None
files = {{name: importlib.import_module(name).__file__ for name in {PACKAGES!r}}}
import autofuse
from autofuse.native_kernels import cpu
print(json.dumps({{
    "files": files,
    "by_entry_point": by_entry_point,
    "enabled": enabled,
    "native": cpu.available(),
    "version": autofuse.__version__,
    "stray": [name for name in ("passes", "lowering", "native_kernels") if importlib.util.find_spec(name)],
}}))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own that also sees the packages of the running one (torch is large)."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> "Environment":
        run([sys.executable, "-m", "venv", "--without-pip", path])
        environment = cls(path)
        # A line of a .pth adds the folder, but does not process the .pth files in it: an editable autofuse
        # of the running environment stays out of sight.
        (environment.site_packages / "running.pth").write_text(sysconfig.get_path("purelib"))
        return environment

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next((self.path / "lib").glob("python*")) / "site-packages"

    def install(self, *what: str | Path, compiler: bool = True) -> None:
        options = ["--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall"]
        run(
            [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", *options, *what], compiler
        )

    def probe(self, folder: Path) -> dict:
        """Runs PROBE as a script that lies in `folder`."""
        script = folder / "probe_installation.py"
        script.write_text(PROBE)
        return json.loads(run([self.python, script], cwd=folder, AUTOFUSE_ENABLE="1").splitlines()[-1])


def run(command: list[str | Path], compiler: bool = True, cwd: Path | None = None, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    if not compiler:
        environment |= {"CC": "/bin/false", "CXX": "/bin/false"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_of_sources(path: Path) -> Path:
    return Path(shutil.copytree(ROOT, path, symlinks=True, ignore=NOT_SOURCE))


def build_wheel(sources: Path, out: Path, compiler: bool = True) -> Path:
    options = ["--no-deps", "--no-index", "--no-build-isolation"]
    run([sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", out, sources], compiler)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_of_sources(folder / "sources"), folder)


def test_a_wheel_holds_one_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"autofuse", wheel.name.split("-py3")[0] + ".dist-info"}
    libraries = {name.split("native_kernels/")[1].split(".")[0] for name in names if name.endswith(".so")}
    assert libraries == {"cpu/_cpu", "gpu/_launch"}
    assert "autofuse/py.typed" in names
    assert not [name for name in names if "test" in name]


def test_a_wheel_fits_every_python(wheel: Path) -> None:
    assert "-py3-none-" in wheel.name


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for room in ROOMS:
        folder = ROOT / room.replace(".", "/")
        ends = ("py", "html", "css", "js", "json", "cu", "cuh")
        files = [path for end in ends for path in folder.rglob(f"*.{end}")]
        assert {str(path.relative_to(ROOT)) for path in files} <= names


def test_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    environment = Environment.create(tmp_path / "env")
    environment.install(wheel)
    found = environment.probe(tmp_path)
    for name, file in found["files"].items():
        assert file == str(environment.site_packages.joinpath(*name.split("."), "__init__.py"))
    assert found["by_entry_point"]
    assert found["enabled"]
    assert found["native"]
    assert not found["stray"]
    assert found["version"] == wheel.name.split("-")[1]


def test_an_editable_install(tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path / "sources")
    environment = Environment.create(tmp_path / "env")
    environment.install("-e", sources)
    found = environment.probe(tmp_path)
    assert {Path(file).resolve() for file in found["files"].values()} == packages_in(sources)
    assert found["by_entry_point"]
    assert found["enabled"]
    assert found["native"]
    assert not found["stray"]


def test_a_script_in_a_checkout_that_is_not_installed(tmp_path: Path) -> None:
    sources = copy_of_sources(tmp_path / "sources")
    found = Environment.create(tmp_path / "env").probe(sources)
    assert {Path(file).resolve() for file in found["files"].values()} == packages_in(sources)


def test_without_a_compiler_it_installs_and_says_what_is_missing(tmp_path: Path) -> None:
    wheel = build_wheel(copy_of_sources(tmp_path / "sources"), tmp_path, compiler=False)
    environment = Environment.create(tmp_path / "env")
    environment.install(wheel)
    found = environment.probe(tmp_path)
    assert set(found["files"]) == set(PACKAGES)
    assert not found["native"]


def packages_in(sources: Path) -> set[Path]:
    folders = (package.split(".")[1:] or ["autofuse"] for package in PACKAGES)
    return {sources.joinpath(*folder, "__init__.py") for folder in folders}
