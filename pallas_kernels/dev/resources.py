"""The resources of a Mosaic GPU kernel on an H100: registers, spills, shared memory, instructions.

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
"""Held while the environment of the process makes Mosaic GPU dump its programs."""
_FORMAT = 2
"""The version of the cached results."""
_POINTER_OPERATION = (
    r"(?:builtin\.unrealized_conversion_cast|llvm\.(?:extractvalue|ptrtoint|add|inttoptr))"
)
"""Operations by which a program takes the pointer of a memref. The memory is that of their first
operand: the others are offsets of 0."""
_H100 = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_core": 233472,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "memory_bandwidth": 3352000000000,
    "l2_cache_size": 52428800,
    "clock_rate_ghz": 1.98,
    "device_memory_size": 84978434048,
    "shared_memory_per_block_optin": 232448,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}
"""XLA's description of the device."""


@dataclass(frozen=True)
class TensorMap:
    """TMA's description of an array, in elements; axes from the outermost."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    """The elements that one copy moves."""
    swizzle: int
    """In bytes; 0: none."""
    offset: int = 0
    """That of the first element."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        bits = re.search(r"\d+", self.dtype)
        assert bits, f"a type without a width: {self.dtype}"
        return int(bits[0]) // 8


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel, in bytes where not stated otherwise."""

    name: str
    threads: int
    registers: int
    """Per thread at launch."""
    stack: int
    spill_stores: int
    """Per thread, as ptxas counts them."""
    spill_loads: int
    """Per thread, as ptxas counts them."""
    static_shared: int
    dynamic_shared: int
    wgmma: int
    """Instructions."""
    tma_loads: int
    """Instructions."""
    tma_stores: int
    """Instructions."""
    set_registers: tuple[tuple[str, int], ...]
    """Changes by setmaxnreg, as ("inc" | "dec", number), in the order of the PTX."""
    warnings: tuple[str, ...]
    """Lines of ptxas; `limits.NOTES` explains the numbers in them."""
    barriers: tuple[int, ...] = ()
    """The arrivals that complete each mbarrier."""
    grid: tuple[int, int, int] = (1, 1, 1)
    """Blocks along x, y and z."""
    tensor_maps: tuple[TensorMap, ...] = ()


def resources(
    fn: Callable[..., Any],
    *shapes: Any,
    capability: tuple[int, int] = (9, 0),
    cache: str | os.PathLike[str] | None = None,
) -> list[KernelResources]:
    """Returns the resources of fn's Mosaic GPU kernels, compiled without a GPU, in their order.

    Args:
      fn: a function of arrays, jitted or not. A kernel that it calls twice with the same shapes is
        compiled, and counted, once.
      shapes: its arguments, pytrees of jax.ShapeDtypeStruct.
      capability: that of the GPU; (9, 0) is Hopper.
      cache: a directory that stores the results by program and versions.

    Raises ValueError if the compiler is not installed, and if fn has no Mosaic GPU kernel. Errors
    of the lowering, such as insufficient shared memory, propagate.
    """
    traced = _traced(fn, shapes, capability)
    stored = Path(cache) / f"kernels-{_key(traced.jaxpr, capability)}.json" if cache else None
    if stored and stored.exists():
        return [_from_json(kernel) for kernel in json.loads(stored.read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        paths = _compile(traced, getattr(fn, "__name__", str(fn)), folder)
        kernels = [_read(path) for path in paths]
    if stored:
        stored.parent.mkdir(parents=True, exist_ok=True)
        rows = [dataclasses.asdict(kernel) for kernel in kernels]
        stored.write_text(json.dumps(rows), encoding="utf-8")
    return kernels


def write_ptx(
    folder: str, fn: Callable[..., Any], *shapes: Any, capability: tuple[int, int] = (9, 0)
) -> list[Path]:
    """Writes the PTX files of fn's Mosaic GPU kernels into `folder`, and returns their paths.

    They are in the order of compilation. Arguments and errors as for `resources`.
    """
    return _compile(_traced(fn, shapes, capability), getattr(fn, "__name__", str(fn)), folder)


def _traced(fn: Callable[..., Any], shapes: tuple[Any, ...], capability: tuple[int, int]) -> Any:
    sharding = SingleDeviceSharding(_device(capability))

    def on_device(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.jit(lambda *args: fn(*args)).trace(*jax.tree.map(on_device, shapes))


def _compile(traced: Any, name: str, folder: str) -> list[Path]:
    """Compiles a traced program, and returns the PTX files that Mosaic GPU wrote into `folder`."""
    lowered = traced.lower()
    program = lowered.compiler_ir()
    if not _kernels(program):
        raise ValueError(f"{name} lowers to no Mosaic GPU kernel")
    with _ONE_AT_A_TIME, _dumping(folder):
        _change_hashes(program)
        lowered.compile()
    return sorted(Path(folder).glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns)


def _key(jaxpr: Any, capability: tuple[int, int]) -> str:
    """The cache key of a traced program.

    The lowered program would include addresses, lines and a count of earlier kernels.
    """
    stable_text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))
    program = "\n".join([stable_text, *sorted(_inlined(jaxpr.jaxpr))])
    key = f"{_FORMAT} {jax.__version__} {capability}\n{program}"
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def _inlined(jaxpr: Any) -> set[str]:
    """The source of the modules of inline_mgpu's functions, which a program has by name only."""
    sources = set()
    for eqn in jaxpr.eqns:
        if compat.primitive_name(eqn) == "inline_mgpu":
            module = Path(inspect.getfile(eqn.params["mgpu_fn"]))
            sources.add(module.read_text(encoding="utf-8"))
        for inner in core.jaxprs_in_params(eqn.params):
            sources |= _inlined(inner)
    return sources


@functools.cache
def _device(capability: tuple[int, int]) -> Any:
    """A compile-only H100."""
    plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        raise ValueError(
            "compiling without a GPU needs XLA's compiler for CUDA; run: pip install -e '.[aot]'"
        )
    major, minor = capability
    info = " ".join(f"{name}: {value}" for name, value in _H100.items())
    target = (
        f"gpu_device_info {{ {info} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} }} }}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 }\n'
        'device_description_str: "NVIDIA H100 80GB HBM3"\nruntime_version { major: 13 minor: 0 }\n'
    )
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    return topology.devices[0]


@contextlib.contextmanager
def _dumping(folder: str) -> Iterator[None]:
    """A context in which Mosaic GPU dumps to a folder.

    DUMP_TO writes the program after every pass, tens of megabytes: the only source of the dynamic
    shared memory of a launch.
    """
    variables = {
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_TO": folder,
    }
    old_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in old_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kernels(program: Any) -> list[Any]:
    """The calls of Mosaic GPU kernels in a StableHLO module."""
    calls = []
    unvisited = [program.operation]
    while unvisited:
        operation = unvisited.pop()
        if _is_kernel(operation):
            calls.append(operation)
        for region in operation.regions:
            for block in region.blocks:
                unvisited += [inner.operation for inner in block.operations]
    return calls


def _is_kernel(operation: Any) -> bool:
    if operation.name != "stablehlo.custom_call":
        return False
    return operation.attributes["call_target_name"].value == "mosaic_gpu_v2"


def _change_hashes(program: Any) -> None:
    """Changes the hashes of kernels. Calls of the same kernel still have the same hash.

    Mosaic GPU compiles a kernel once per process and hash, and dumps nothing the second time.
    """
    salt = os.urandom(16)
    with program.context:
        for call in _kernels(program):
            config = {entry.name: entry.attr for entry in call.attributes["mhlo.backend_config"]}
            old_hash = config["kernel_hash"].value_bytes
            config["kernel_hash"] = ir.StringAttr.get(hashlib.sha256(old_hash + salt).digest())
            call.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)


def _read(ptx: Path) -> KernelResources:
    """The resources of a kernel, from its PTX file and the files that were dumped beside it."""
    text = ptx.read_text(encoding="utf-8")
    ptxas = ptx.with_suffix(".ptxas").read_text(encoding="utf-8")
    passes = ptx.with_suffix(".mlir-passes.log")

    def number(pattern: str, source: str, default: int | None = None) -> int:
        match = re.search(pattern, source)
        if match:
            return int(match[1])
        if default is None:
            raise AssertionError(
                f"{pattern!r} is not in what the compiler wrote for {ptx.name}:\n{source[:2000]}"
            )
        return default

    host = _host_code(passes)
    launch = host[-1]
    blocks = re.search(r"blocks\(.*?\) in \((.*?)\)", launch)
    assert blocks, f"the launch of {ptx.name} has no grid: {launch}"
    changes = re.findall(r"\bsetmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)", text)
    grid: Any = tuple(int(n) for n in re.findall(r"= %c(\d+)", blocks[1]))
    warnings = [
        line.strip()
        for line in ptxas.splitlines()
        if "warning" in line.lower() or re.search(r"\(C\d+\)|serialized", line)
    ]
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
        set_registers=tuple((direction, int(n)) for direction, n in changes),
        warnings=tuple(warnings),
        barriers=tuple(_arrivals(text)),
        grid=grid,
        tensor_maps=tuple(dict.fromkeys(_tensor_maps(host))),
    )


def _host_code(passes: Path) -> list[str]:
    """The lines of a program before its first pass, up to and with the kernel's launch."""
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
    """The tensor maps that a program initialises.

    A call has the array, its dtype, rank, sizes and strides, the swizzle, and the box. The box is a
    pointer to numbers that were stored one by one, before jax 0.12 with `llvm.store` to an
    `llvm.alloca`, since then with `memref.store` to a `memref.alloca`, whose pointer is then taken
    in several instructions.
    """
    values = _HostValues()
    array: re.Match[str] | None = None
    for line in host:
        if values.read(line):
            continue
        array = re.search(_ARRAY, line) or array
        call = re.search(r"call @mosaic_gpu_init_tma_desc\((.*?)\)", line)
        if call:
            assert array, "a tensor map of no array"
            names = call[1].split(", ")
            rank = values.constants[names[3]]
            swizzle = values.constants[names[6]]
            yield _tensor_map(array, values.numbers(names[7], rank), swizzle)


class _HostValues:
    """The constants of a program, and the numbers that it stores in memory, by SSA name."""

    def __init__(self) -> None:
        self.constants: dict[str, int] = {}
        # A pointer -> the memory and the index in it.
        self.elements: dict[str, tuple[str, int]] = {}
        # A pointer -> the memory that it points to.
        self.memory: dict[str, str] = {}
        # A memory and an index -> the name of the value.
        self.stored: dict[tuple[str, int], str] = {}
        self.rules = (
            (r"(%\S+) = arith\.constant (\d+) : (?:i64|index)", self._constant),
            (r"(%\S+) = llvm\.getelementptr (%\S+)\[(\d+)\]", self._element),
            (r"llvm\.store (%\S+), (%\S+) : i64", self._llvm_store),
            (r"memref\.store (%\S+), (%\S+)\[(%\S+)\] : memref<\d+xi64>", self._memref_store),
            (rf"(%\S+) = {_POINTER_OPERATION} (%[^\s\[,]+)", self._pointer),
        )

    def read(self, line: str) -> bool:
        """Reads a line of the program. Returns whether it was one of these operations."""
        for pattern, rule in self.rules:
            match = re.search(pattern, line)
            if match:
                rule(*match.groups())
                return True
        return False

    def numbers(self, pointer: str, length: int) -> tuple[int, ...]:
        """The numbers in the memory of a pointer."""
        memory = self.memory.get(pointer, pointer)
        return tuple(self.constants[self.stored[memory, i]] for i in range(length))

    def _constant(self, name: str, value: str) -> None:
        self.constants[name] = int(value)

    def _element(self, name: str, memory: str, index: str) -> None:
        self.elements[name] = (memory, int(index))

    def _llvm_store(self, value: str, pointer: str) -> None:
        self.stored[self.elements.get(pointer, (pointer, 0))] = value

    def _memref_store(self, value: str, memory: str, index: str) -> None:
        self.stored[memory, self.constants[index]] = value

    def _pointer(self, name: str, source: str) -> None:
        self.memory[name] = self.memory.get(source, source)


_ARRAY = (
    r"extract_strided_metadata %\S+ : memref<(\S+?)(?:, strided<\[(.*?)\](?:, offset: "
    r"(\d+|\?))?>)?> ->"
)
"""The type of an array that is passed to TMA: its shape and dtype, strides, and offset."""


def _tensor_map(array: re.Match[str], box: tuple[int, ...], swizzle: int) -> TensorMap:
    """The map of an array, a match of `_ARRAY`. swizzle: in bytes; 16 is none."""
    *dims, dtype = array[1].split("x")
    shape = tuple(map(int, dims))
    if array[2]:
        strides = tuple(map(int, array[2].split(", ")))
    else:
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorMap(
        dtype=dtype,
        shape=shape,
        strides=strides,
        box=box,
        swizzle=0 if swizzle == 16 else swizzle,
        offset=int(array[3]) if (array[3] or "").isdigit() else 0,
    )


def _from_json(data: dict[str, Any]) -> KernelResources:
    """The resources from JSON, which has lists for tuples."""

    def tuples(x: Any) -> Any:
        return tuple(map(tuples, x)) if isinstance(x, list) else x

    fields: dict[str, Any] = {name: tuples(x) for name, x in data.items()}
    maps = []
    for tensor_map in data["tensor_maps"]:
        maps.append(TensorMap(**{name: tuples(x) for name, x in tensor_map.items()}))
    fields["tensor_maps"] = tuple(maps)
    return KernelResources(**fields)
