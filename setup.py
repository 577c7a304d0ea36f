"""Builds the CPU kernels, and launches for GPUs, as shared libraries with a plain C ABI: they link neither
Python nor libtorch, so that one binary serves every Python and every torch. Everything else is in
pyproject.toml."""

from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

WARNINGS = ["-Wall", "-Wextra"]


class PlainWheel(bdist_wheel):
    """The libraries are loaded with ctypes: the wheel depends on the platform and on no Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


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
    cmdclass={"bdist_wheel": PlainWheel},
)
