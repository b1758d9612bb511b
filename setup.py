"""Extension modules only; everything else stands in pyproject.toml."""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

debug = os.environ.get("FASTPORTS_DEBUG") == "1"
sanitize = os.environ.get("FASTPORTS_SANITIZE") == "1"
compile_args = ["-O0", "-g3"] if debug or sanitize else ["-O2", "-g0"]
# -Wtype-limits fires in helpers that Cython generates, never in ours
compile_args += ["-Wall", "-Wextra", "-Wno-type-limits"]
link_args = []
if os.environ.get("FASTPORTS_WERROR") == "1":
    compile_args += ["-Werror"]
if sanitize:
    flags = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
    compile_args += flags
    link_args += flags

extensions = [
    Extension(
        path[:-4].replace(os.sep, "."),
        [path],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )
    for path in sorted(glob("fastports/*.pyx"))
]
if not extensions:  # an sdist without them would become a wheel that cannot be imported
    raise SystemExit("fastports/*.pyx are missing from these sources; see MANIFEST.in")
directives = {"boundscheck": debug, "wraparound": False}
directives |= {"auto_pickle": False, "autotestdict": False}  # nothing here can be pickled
setup(
    ext_modules=cythonize(
        extensions, build_dir="build/cython", compiler_directives=directives, annotate=debug
    )
)
