"""Builds the extension badam_kernels._C with CMake and Ninja; where that fails, installs the Python part alone and says so."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def tool(name: str) -> str:
    """The program `name`: beside this Python first, so that it is found in an environment that is not activated."""
    path = shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))
    if path is None:
        raise FileNotFoundError(f"{name} not found: pip install {name}")
    return path


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            self.build_with_cmake(target)
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)  # one left by an earlier build must not pass for this one's
            self.warn(
                f"\n*** badam_kernels is installed WITHOUT its compiled extension: {error}\n"
                "*** Everything works through the slow backend 'reference'. For the fast one, install a C++17 compiler "
                "and install again; `python -m badam_kernels doctor` shows what is there.\n"
            )

    def build_with_cmake(self, target: Path) -> None:
        import pybind11

        build = Path(self.build_temp).resolve() / "cmake"
        # A cache remembers its compiler and its build environment, both of which may be gone by now.
        shutil.rmtree(build, ignore_errors=True)
        build.mkdir(parents=True)
        configure = [
            *(tool("cmake"), "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]
        subprocess.run(configure, check=True)
        subprocess.run([tool("cmake"), "--build", str(build)], check=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(next(build.glob("_C*.so")), target)


setup(
    license="Apache-2.0",  # no way to say it in pyproject.toml suits both old and new setuptools
    ext_modules=[Extension("badam_kernels._C", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild},
)
