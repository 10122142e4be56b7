"""The resources of a Mosaic GPU kernel on an H100: registers, spills, shared memory, and counts of
the important instructions.

It needs XLA's compiler for CUDA and ptxas (the extra `aot`), but no GPU and no driver. Instructions
are counted in the PTX, which needs no disassembler; for the one kernel compared, jax's attention,
the counts of wgmma and TMA loads equal HGMMA and UTMALDG in the machine code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src import core
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxlib.mlir import ir

from pallas_kernels import compat

_ONE_AT_A_TIME = threading.Lock()
"""Held while the environment of the process makes Mosaic GPU dump what it compiles."""
_FORMAT = 2
"""The version of the cached results."""
_OF_A_POINTER = (
    r"(?:builtin\.unrealized_conversion_cast|llvm\.(?:extractvalue|ptrtoint|add|inttoptr))"
)
"""Operations by which a program takes the pointer of a memref. The memory is that of their first
operand: the others are offsets of 0."""


@dataclass(frozen=True)
class TensorMap:
    """What the copying unit (TMA) knows of an array, in elements: axes from the outermost, and the
    box that one copy moves.

    swizzle: in bytes; 0: none. offset: of the first element.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    offset: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        bits = re.search(r"\d+", self.dtype)
        assert bits, f"a type without a width: {self.dtype}"
        return int(bits[0]) // 8


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel, in bytes where not stated otherwise.

    registers: per thread at launch; set_registers: changes by setmaxnreg, as ("inc" | "dec",
    number), in the order of the PTX. spill_stores and spill_loads: per thread, as ptxas counts
    them. warnings: lines of ptxas; `limits.NOTES` says what the numbers in them mean. barriers: the
    arrivals that complete each mbarrier. grid: blocks along x, y and z.
    """

    name: str
    threads: int
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    dynamic_shared: int
    wgmma: int
    tma_loads: int
    tma_stores: int
    set_registers: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...]
    barriers: tuple[int, ...] = ()
    grid: tuple[int, int, int] = (1, 1, 1)
    tensor_maps: tuple[TensorMap, ...] = ()


def resources(
    fn: Callable[..., Any],
    *shapes: Any,
    capability: tuple[int, int] = (9, 0),
    cache: str | os.PathLike[str] | None = None,
) -> list[KernelResources]:
    """The resources of fn's Mosaic GPU kernels, in the order of compilation. Compiles fn without a
    GPU.

    Args:
      fn: a function of arrays, jitted or not. A kernel that it calls twice with the same shapes is
      compiled, and counted, once. shapes: its arguments, pytrees of jax.ShapeDtypeStruct.
      capability: that of the GPU; (9, 0) is Hopper. cache: a directory that keeps the results by
      program and versions.

    Raises ValueError if the compiler is not installed, and if fn has no Mosaic GPU kernel. Errors
    of the lowering, such as insufficient shared memory, propagate.
    """
    traced = _traced(fn, shapes, capability)
    kept = Path(cache) / f"kernels-{_key(traced.jaxpr, capability)}.json" if cache else None
    if kept and kept.exists():
        return [_from_json(kernel) for kernel in json.loads(kept.read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        kernels = [
            _read(path) for path in _compile(traced, getattr(fn, "__name__", str(fn)), folder)
        ]
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(
            json.dumps([dataclasses.asdict(kernel) for kernel in kernels]), encoding="utf-8"
        )
    return kernels


def write_ptx(
    folder: str, fn: Callable[..., Any], *shapes: Any, capability: tuple[int, int] = (9, 0)
) -> list[Path]:
    """The PTX files of fn's Mosaic GPU kernels, in the order of compilation, in `folder`. Arguments
    and errors as for `resources`.
    """
    return _compile(_traced(fn, shapes, capability), getattr(fn, "__name__", str(fn)), folder)


def _traced(fn: Callable[..., Any], shapes: tuple[Any, ...], capability: tuple[int, int]) -> Any:
    sharding = SingleDeviceSharding(_device(capability))
    placed = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes
    )
    return jax.jit(lambda *args: fn(*args)).trace(*placed)


def _compile(traced: Any, name: str, folder: str) -> list[Path]:
    """Compiles a traced program, and returns the PTX files that Mosaic GPU wrote into `folder` on
    the way.
    """
    lowered = traced.lower()
    if not _kernels(program := lowered.compiler_ir()):
        raise ValueError(f"{name} lowers to no Mosaic GPU kernel")
    with _ONE_AT_A_TIME, _dumping(folder):
        _change_hashes(program)
        lowered.compile()
    return sorted(Path(folder).glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns)


def _key(jaxpr: Any, capability: tuple[int, int]) -> str:
    """The cache key of a traced program. The lowered program would include addresses, lines and a
    count of earlier kernels.
    """
    program = "\n".join([re.sub(r"0x[0-9a-f]+", "", str(jaxpr)), *sorted(_inlined(jaxpr.jaxpr))])
    return hashlib.sha256(
        f"{_FORMAT} {jax.__version__} {capability}\n{program}".encode()
    ).hexdigest()[:24]


def _inlined(jaxpr: Any) -> set[str]:
    """The modules of functions of inline_mgpu, of which a program has only the names."""
    found = set()
    for eqn in jaxpr.eqns:
        if compat.primitive_name(eqn) == "inline_mgpu":
            found.add(Path(inspect.getfile(eqn.params["mgpu_fn"])).read_text(encoding="utf-8"))
        for inner in core.jaxprs_in_params(eqn.params):
            found |= _inlined(inner)
    return found


@functools.cache
def _device(capability: tuple[int, int]) -> Any:
    if not (
        importlib.util.find_spec("jax_cuda13_plugin")
        or importlib.util.find_spec("jax_cuda12_plugin")
    ):
        raise ValueError(
            "compiling without a GPU needs XLA's compiler for CUDA; run: pip install -e '.[aot]'"
        )
    fields = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
        "shared_memory_per_core": 233472,
        "threads_per_core_limit": 2048, "core_count": 132, "fpus_per_core": 128,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535, "block_dim_limit_z": 65535, "memory_bandwidth": 3352000000000,
        "l2_cache_size": 52428800,
        "clock_rate_ghz": 1.98, "device_memory_size": 84978434048,
        "shared_memory_per_block_optin": 232448,
        "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
    }  # fmt: skip
    target = (
        f"gpu_device_info {{ {' '.join(f'{name}: {value}' for name, value in fields.items())} "
        f"cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }} }}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 }\n'
        'device_description_str: "NVIDIA H100 80GB HBM3"\nruntime_version { major: 13 minor: 0 }\n'
    )
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology="1x1x1"
    ).devices[0]


@contextlib.contextmanager
def _dumping(folder: str) -> Iterator[None]:
    """Makes Mosaic GPU dump to a folder. DUMP_TO writes the program after every pass, tens of
    megabytes: the only source of the dynamic shared memory of a launch.
    """
    wanted = {
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": folder,
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kernels(program: Any) -> list[Any]:
    """The calls of Mosaic GPU kernels in a StableHLO module."""
    calls, left = [], [program.operation]
    while left:
        operation = left.pop()
        if (
            operation.name == "stablehlo.custom_call"
            and operation.attributes["call_target_name"].value == "mosaic_gpu_v2"
        ):
            calls.append(operation)
        left += [
            inner.operation
            for region in operation.regions
            for block in region.blocks
            for inner in block.operations
        ]
    return calls


def _change_hashes(program: Any) -> None:
    """Changes the hashes of kernels. Mosaic GPU compiles a kernel once per process and hash, and
    dumps nothing the second time.
    """
    salt = os.urandom(16)
    with program.context:
        for call in _kernels(program):
            config = {entry.name: entry.attr for entry in call.attributes["mhlo.backend_config"]}
            known = config["kernel_hash"].value_bytes
            config["kernel_hash"] = ir.StringAttr.get(
                hashlib.sha256(known + salt).digest()
            )  # calls of the same kernel still have the same hash
            call.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)


def _read(ptx: Path) -> KernelResources:
    text, ptxas, passes = (
        ptx.read_text(encoding="utf-8"),
        ptx.with_suffix(".ptxas").read_text(encoding="utf-8"),
        ptx.with_suffix(".mlir-passes.log"),
    )

    def number(pattern: str, where: str, default: int | None = None) -> int:
        if match := re.search(pattern, where):
            return int(match[1])
        if default is None:
            raise AssertionError(
                f"{pattern!r} is not in what the compiler wrote for {ptx.name}:\n{where[:2000]}"
            )
        return default

    host = _host_code(passes)
    launch = host[-1]
    blocks = re.search(r"blocks\(.*?\) in \((.*?)\)", launch)
    assert blocks, f"the launch of {ptx.name} has no grid: {launch}"
    return KernelResources(
        name=re.sub(r"_\d+$", "", ptx.stem),
        threads=number(r"\.maxntid (\d+)", text),
        registers=number(r"Used (\d+) registers", ptxas),
        stack=number(r"(\d+) bytes stack frame", ptxas),
        spill_stores=number(r"(\d+) bytes spill stores", ptxas),
        spill_loads=number(r"(\d+) bytes spill loads", ptxas),
        static_shared=number(r"(\d+) bytes smem", ptxas, 0),
        dynamic_shared=number(r"dynamic_shared_memory_size %c(\d+)_i32", launch),
        wgmma=len(re.findall(r"\bwgmma\.mma_async\.", text)),
        tma_loads=len(re.findall(r"\bcp\.async\.bulk\.tensor\.\dd\.shared::", text)),
        tma_stores=len(re.findall(r"\bcp\.(?:reduce\.)?async\.bulk\.tensor\.\dd\.global\.", text)),
        set_registers=tuple(
            (way, int(n))
            for way, n in re.findall(r"\bsetmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", text)
        ),
        warnings=tuple(
            line.strip()
            for line in ptxas.splitlines()
            if "warning" in line.lower() or re.search(r"\(C\d+\)|serialized", line)
        ),
        barriers=tuple(_arrivals(text)),
        grid=tuple(int(n) for n in re.findall(r"= %c(\d+)", blocks[1])),  # pyright: ignore[reportArgumentType]
        tensor_maps=tuple(dict.fromkeys(_tensor_maps(host))),
    )


def _host_code(passes: Path) -> list[str]:
    """The lines of a program before its first pass, up to the kernel's launch, which is the
    last.
    """
    host = []
    with passes.open(encoding="utf-8") as lines:
        for line in lines:
            host.append(line)
            if re.search(r"dynamic_shared_memory_size %c\d+_i32", line):
                return host
    raise AssertionError(f"{passes.name} has no launch")


def _arrivals(ptx: str) -> Iterator[int]:
    """The count that each mbarrier is initialised with: in a register, which holds a constant."""
    constants = dict(re.findall(r"\bmov\.b32\s+(%r\d+), (\d+);", ptx))
    for count in re.findall(r"\bmbarrier\.init\.shared\S*\s+\[.*?\], (%r\d+|\d+);", ptx):
        yield int(constants[count] if count.startswith("%") else count)


def _tensor_maps(host: list[str]) -> Iterator[TensorMap]:
    """The arguments of each call that initialises a tensor map: array, its dtype, rank, sizes and
    strides, the swizzle, and the box.

    The box is a pointer to numbers that were stored one by one, before jax 0.12 with `llvm.store`
    to an `llvm.alloca`, since then with `memref.store` to a `memref.alloca`, whose pointer is then
    taken in several instructions.
    """
    constants: dict[str, int] = {}
    places: dict[str, tuple[str, int]] = {}
    memory: dict[str, str] = {}
    stored: dict[tuple[str, int], str] = {}
    array = ""
    for line in host:
        if match := re.search(r"(%\S+) = arith\.constant (\d+) : (?:i64|index)", line):
            constants[match[1]] = int(match[2])
        elif match := re.search(r"(%\S+) = llvm\.getelementptr (%\S+)\[(\d+)\]", line):
            places[match[1]] = match[2], int(match[3])
        elif match := re.search(r"llvm\.store (%\S+), (%\S+) : i64", line):
            stored[places.get(match[2], (match[2], 0))] = match[1]
        elif match := re.search(r"memref\.store (%\S+), (%\S+)\[(%\S+)\] : memref<\d+xi64>", line):
            stored[match[2], constants[match[3]]] = match[1]
        elif match := re.search(rf"(%\S+) = {_OF_A_POINTER} (%[^\s\[,]+)", line):
            memory[match[1]] = memory.get(match[2], match[2])
        elif match := re.search(
            (
                r"extract_strided_metadata %\S+ : memref<(\S+?)(?:, strided<\[(.*?)\](?:, offset: "
                r"(\d+|\?))?>)?> ->"
            ),
            line,
        ):
            array = match
        elif match := re.search(r"call @mosaic_gpu_init_tma_desc\((.*?)\)", line):
            names = match[1].split(", ")
            rank, swizzle, box = (
                constants[names[3]],
                constants[names[6]],
                memory.get(names[7], names[7]),
            )
            sizes = tuple(constants[stored[box, axis]] for axis in range(rank))
            assert array, "a tensor map of no array"
            *shape, dtype = array[1].split("x")
            dims = tuple(map(int, shape))
            strides = (
                tuple(map(int, array[2].split(", ")))
                if array[2]
                else tuple(math.prod(dims[i + 1 :]) for i in range(rank))
            )
            yield TensorMap(
                dtype,
                dims,
                strides,
                sizes,
                0 if swizzle == 16 else swizzle,
                int(array[3]) if (array[3] or "").isdigit() else 0,
            )


def _from_json(data: dict[str, Any]) -> KernelResources:
    def tuples(x: Any) -> Any:
        return tuple(map(tuples, x)) if isinstance(x, list) else x

    maps = [
        TensorMap(**{name: tuples(x) for name, x in one.items()}) for one in data["tensor_maps"]
    ]
    fields: dict[str, Any] = {name: tuples(x) for name, x in data.items()} | {
        "tensor_maps": tuple(maps)
    }
    return KernelResources(**fields)
