"""Builds the CPU kernels, and launches for GPUs, as shared libraries with a plain C ABI: they link neither
Python nor libtorch, so that one binary serves every Python and every torch. Everything else is in
pyproject.toml."""

from concurrent.futures import ThreadPoolExecutor
from glob import glob
from os import cpu_count
from os.path import getsize
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

WARNINGS = ["-Wall", "-Wextra"]


class PlainWheel(bdist_wheel):
    """The libraries are loaded with ctypes: the wheel depends on the platform and on no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class ParallelBuild(build_ext):
    """Compiles as many sources at once as there are cores, the largest first."""

    def build_extensions(self) -> None:
        compile_alone = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            largest_first = sorted(sources, key=getsize, reverse=True)
            with ThreadPoolExecutor(cpu_count()) as pool:
                objects = pool.map(lambda source: compile_alone([source], **options), largest_first)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_all
        super().build_extensions()


setup(
    ext_modules=[
        Extension(
            "autofuse.native_kernels.cpu._cpu",
            sources=sorted(glob("native_kernels/cpu/*.cpp")),
            depends=sorted(glob("native_kernels/cpu/*.h")),
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", *WARNINGS],
            extra_link_args=["-pthread", "-lrt"],
            language="c++",
            py_limited_api=True,
            optional=True,  # without a compiler the package still installs; CPU sites are then kept
        ),
        Extension(
            "autofuse.native_kernels.gpu._launch",
            sources=["native_kernels/gpu/launch.cpp"],
            extra_compile_args=["-std=c++17", "-O3", "-fvisibility=hidden", *WARNINGS],
            language="c++",
            py_limited_api=True,
            optional=True,  # without it Python launches, which takes longer
        ),
    ],
    cmdclass={"bdist_wheel": PlainWheel, "build_ext": ParallelBuild},
)
