"""Predicts the rates of GEMM on Arm cores without the hardware: arm_loops.py [--cores neoverse-v1 …]

Compiles the kernels with Debian's cross-compiler, finds the innermost loops that multiply, and lets llvm-mca, whose
models follow Arm's optimization guides, tell the cycles that an iteration takes when all data is in the first-level
cache. Printed are multiply-adds a cycle of the widest tile and of one row, beside what the core does of the instruction
alone, and of those that the kernels do not use yet (apt-get install g++-aarch64-linux-gnu llvm-19).
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILER, DUMP, MCA = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-objdump", "llvm-mca-19"
LEVELS = {"neoverse-v1": ("neon_dotprod", "sve256"), "neoverse-v2": ("neon_dotprod",), "neoverse-n2": ("neon_dotprod",)}
VECTOR = {"neon_dotprod": 16, "sve256": 32}     # bytes
#: multiply-adds of an instruction for each byte of its vector
PRODUCTS = {"fmla": 1 / 4, "sdot": 1.0, "bfdot": 1 / 2, "bfmmla": 1.0, "smmla": 2.0}
ALONE = {
    "neon_dotprod": {"fmla": "fmla v{d}.4s, v30.4s, v31.4s", "sdot": "sdot v{d}.4s, v30.16b, v31.16b",
                     "bfdot": "bfdot v{d}.4s, v30.8h, v31.8h", "bfmmla": "bfmmla v{d}.4s, v30.8h, v31.8h",
                     "smmla": "smmla v{d}.4s, v30.16b, v31.16b"},
    "sve256": {"fmla": "fmla z{d}.s, p0/m, z30.s, z31.s", "sdot": "sdot z{d}.s, z30.b, z31.b",
               "bfdot": "bfdot z{d}.s, z30.h, z31.h", "bfmmla": "bfmmla z{d}.s, z30.h, z31.h",
               "smmla": "smmla z{d}.s, z30.b, z31.b"},
}
#: name -> source, text in the function's name, instruction
FORMATS = {"float32": ("matmul", "Floats<float>", "fmla"), "bfloat16": ("matmul", "Floats<unsigned short>", "fmla"),
           "w8a8, int8": ("matmul_integer", "<Bytes,", "sdot"), "w4a8, int4": ("matmul_integer", "<Nibbles,", "sdot")}

Loop = list[tuple[str, str]]    # instruction, operands


def compiled(level: str, source: str, folder: Path) -> Path:
    """The object file of one source of the kernels."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    out = folder / f"{level}-{source}.o"
    subprocess.run([COMPILER, *setup["COMMON"], *setup["ISAS"]["aarch64"][level], f"-DAS_ISA={level}", "-I",
                    str(ROOT / "native"), "-c", str(ROOT / "native/cpu/kernels" / f"{source}.cpp"), "-o", str(out)],
                   check=True)
    return out


def functions(path: Path) -> Iterator[tuple[str, list[tuple[int, str, str]]]]:
    """The functions of an object file: name, and address, instruction and operands of each line."""
    text = subprocess.run([DUMP, "-dC", "--no-show-raw-insn", str(path)], check=True, capture_output=True,
                          text=True).stdout
    for part in re.split(r"^[0-9a-f]+ <(?=.*>:$)", text, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition(">:\n")
        name = re.sub(r"as::\w+::|\(anonymous namespace\)::", "", name)
        lines = re.findall(r"^\s+([0-9a-f]+):\s+(\S+)[ \t]*(.*)$", body, re.MULTILINE)
        yield name, [(int(address, 16), op, rest) for address, op, rest in lines]


def inner_loops(lines: list[tuple[int, str, str]]) -> Iterator[Loop]:
    """The loops without loops in them."""
    at = {address: i for i, (address, _, _) in enumerate(lines)}
    ends = []
    for i, (_, op, rest) in enumerate(lines):
        target = re.search(r"([0-9a-f]+) <", rest)
        if target and op != "bl" and (begin := at.get(int(target[1], 16), i)) < i:
            ends.append((begin, i))
    for begin, end in ends:
        if not any(begin <= b and e <= end and (b, e) != (begin, end) for b, e in ends):
            yield [(op, rest) for _, op, rest in lines[begin:end + 1]]


def cycles(core: str, text: str) -> float:
    """Cycles of an iteration in the long run."""
    with tempfile.NamedTemporaryFile("w", suffix=".s") as file:
        file.write(text)
        file.flush()
        done = subprocess.run([MCA, "-mtriple=aarch64", f"-mcpu={core}", "-mattr=+bf16,+i8mm,+sve,+dotprod",
                               "--iterations=400", file.name], check=True, capture_output=True, text=True).stdout
    return int(re.search(r"Total Cycles:\s+(\d+)", done)[1]) / 400


def text_of(loop: Loop) -> str:
    """A loop as assembly; its jumps go to its beginning."""
    lines = [f"{op} {re.sub(r'[0-9a-f]+ <.*', 'again', rest).split('//')[0]}" for op, rest in loop]
    return "again:\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", nargs="*", default=list(LEVELS), choices=list(LEVELS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found: dict[tuple[str, str], dict[int, Loop]] = {}
        for level in VECTOR:
            for source in ("matmul", "matmul_integer"):
                for name, lines in functions(compiled(level, source, Path(folder))):
                    for form, (place, text, op) in FORMATS.items():
                        if place == source and text in name:
                            for loop in inner_loops(lines):
                                count = sum(o == op for o, _ in loop)
                                best = found.setdefault((level, form), {})
                                # Of several loops with as many products (with and without tails) the longest.
                                if count >= 4 and len(loop) > len(best.get(count, [])):
                                    best[count] = loop
    print("multiply-adds a cycle (part of the instruction's own rate)")
    for core in options.cores:
        for level in LEVELS[core]:
            alone = {op: 24 * PRODUCTS[op] * VECTOR[level] / cycles(
                core, "\n".join(line.format(d=d) for d in range(24)) + "\n") for op, line in ALONE[level].items()}
            print(f"{core}, {level}: alone " + ", ".join(f"{op} {rate:.0f}" for op, rate in alone.items()))
            for form, (_, _, op) in FORMATS.items():
                loops = found[level, form]
                cells = []
                for label, count in (("many rows", max(loops)), ("one row", min(loops))):
                    loop = loops[count]
                    rate = count * PRODUCTS[op] * VECTOR[level] / cycles(core, text_of(loop))
                    cells.append(f"{label} {rate:.1f} ({rate / alone[op]:.2f}; {len(loop)} instructions, {count} {op})")
                print(f"    {form:<12}" + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
