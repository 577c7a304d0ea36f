"""Applies faults to a copy of the sources, one at a time, and runs the tests that can find them.

    python -m tests.mutations.run --check                        every text occurs exactly once
    python -m tests.mutations.run --suite fast                   the tests of `make test`
    python -m tests.mutations.run --suite full --old TREE        the tests and sources of another checkout
    python -m tests.mutations.run --only "a ring" "no fence"     mutations whose names contain one of these
    python -m tests.mutations.run --every 2                      every second mutation

Prints a table in Markdown. Each mutation has a copy of its own below the folder for temporary files, with the
CPU kernels built again where their sources changed. Tests run one after another and stop at the first
failure. Two mutations run at a time (`--jobs`).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("autofuse", "passes", "lowering", "native_kernels")
SUITES = {"fast": "not full and not gpu and not wheel", "full": "not gpu and not wheel"}
LIMIT_S = 900.0
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", re.MULTILINE)


def sources(tree: Path) -> list[Path]:
    """The tracked files of the rooms."""
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=tree, capture_output=True, text=True, check=True)
    return [Path(name) for name in listed.stdout.splitlines() if not (tree / name).is_symlink()]


def place(mutation: Mutation, tree: Path) -> tuple[Path, str, str]:
    """The file of the tree that the mutation changes, the text, and what replaces it. Else ValueError."""
    named = [path for path in sources(tree) if path.name in mutation.file.split("|")]
    for text, instead in ((mutation.text, mutation.instead), mutation.old):
        found = [path for path in named for _ in range((tree / path).read_text().count(text)) if text]
        if len(found) == 1:
            return found[0], text, instead
        if found:
            raise ValueError(f"{mutation.name}: the text occurs {len(found)} times")
    raise ValueError(f"{mutation.name}: the text is not in {', '.join(map(str, named)) or mutation.file}")


def build(tree: Path) -> None:
    """The CPU kernels, in place."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, capture_output=True, check=True)


LIBRARIES = ("native_kernels/cpu/_cpu*.so", "native_kernels/gpu/_launch*.so")


def copy(tree: Path, to: Path) -> None:
    """The tracked files, and the libraries as they were built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, target, follow_symlinks=False)
    for name in LIBRARIES:
        for library in tree.glob(name):
            shutil.copy2(library, to / library.relative_to(tree))


def shortened(test: str) -> str:
    """The test without its folder, and without parameters that do not fit into a table."""
    name, bracket, parameters = test.rpartition("/")[2].partition("[")
    return name + bracket + (parameters if len(parameters) < 40 else "...]" if bracket else "")


def judge(mutation: Mutation | None, tree: Path, tests: Sequence[str], suite: str) -> tuple[str, float]:
    """The test that fails, or SURVIVED; and how long it took."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        scratch = Path(directory, "tree")
        copy(tree, scratch)
        if mutation is not None:
            path, text, instead = place(mutation, tree)
            (scratch / path).write_text((scratch / path).read_text().replace(text, instead))
            if path.suffix in (".cpp", ".h") and "cpu" in path.parts:
                build(scratch)
        there = [test for test in tests if (scratch / test).exists()]
        assert there, f"none of {tests} is in {tree}"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
        command += ["-rfE", "-m", SUITES[suite], *there]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=scratch,
                env=os.environ | {"PYTHONPATH": str(scratch)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {LIMIT_S:g} s", LIMIT_S
        seconds = time.monotonic() - began
        if done.returncode == 0:
            return "SURVIVED", seconds
        failed = FAILED.findall(done.stdout)
        return (shortened(failed[0]) if failed else f"pytest ends with {done.returncode}"), seconds


def main() -> int:
    """The command."""
    parser = ArgumentParser(description=__doc__, prog="python -m tests.mutations.run")
    parser.add_argument("--suite", choices=SUITES, default="fast")
    parser.add_argument(
        "--old", type=Path, default=ROOT, metavar="TREE", help="another checkout, tests included"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if any(text in m.name for text in options.only)][:: options.every]
    wrong = 0
    for mutation in chosen:
        try:
            path, *_ = place(mutation, options.old)
            if options.check:
                print(f"{mutation.name}: {path}")
        except ValueError as error:
            wrong += 1
            print(error)
    if options.check or wrong:
        print(f"{len(chosen)} mutations, {wrong} of them cannot be applied")
        return int(wrong > 0)
    if not all(any(options.old.glob(name)) for name in LIBRARIES):
        build(options.old)
    print(f"| mutation | file | {options.suite} suite | s |\n|---|---|---|---|", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(judge, m, options.old, m.tests, options.suite) for m in chosen]
        results = []
        for mutation, job in zip(chosen, jobs, strict=True):
            verdict, seconds = job.result()
            results.append(verdict)
            path, *_ = place(mutation, options.old)
            print(f"| {mutation.name} | {path} | {verdict} | {seconds:.0f} |", flush=True)
    print(f"\n{len(results) - results.count('SURVIVED')} of {len(results)} found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
