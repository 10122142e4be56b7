"""GPUs to compile for, as data. Units: bytes, FLOP/s, bytes/s in one direction per GPU.

Compute and memory figures are the vendor's data sheets' (dense, without sparsity; NVIDIA H100,
H200, A100 and B200 data sheets).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from sharding_rules.lab.report import CompilerMissing, LabError
from sharding_rules.mesh import AXES, MeshConfig, make_mesh
from sharding_rules.rules import did_you_mean

NODE = 8
"""GPUs of a node, unless a target says otherwise."""
MEMORY_FRACTION = 0.92
"""Share of a GPU's memory that a run gives to JAX (whose default is 0.75); the rest is for CUDA,
NCCL's buffers and cuBLAS."""

_PTXAS_FOLDERS = ("cu13", "cuda_nvcc")
"""Where the wheels of CUDA 13 and 12 keep ptxas, inside the package nvidia."""
_PACKAGES = (
    "jax-cuda13-plugin=={jax}",
    "nvidia-cuda-nvcc>=13,<14",
    "nvidia-nvvm>=13,<14",
    "nvidia-cuda-runtime>=13,<14",
)
"""The least that compiles for GPUs that you do not have: XLA's plugin, ptxas, libdevice."""
_DEVICES = Path("/dev")


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, and the node it sits in. Rates are peaks of one GPU."""

    name: str
    description: str
    """What XLA calls the device."""
    capability: tuple[int, int]
    """CUDA's compute capability, (9, 0) for sm_90."""
    cores: int
    """Streaming multiprocessors."""
    clock_ghz: float
    hbm: int
    """Bytes of device memory."""
    hbm_bandwidth: float
    """Bytes/s between device memory and cores."""
    flops: dict[str, float]
    """FLOP/s of the tensor cores by dtype."""
    nvlink: float
    """Bytes/s in one direction inside a node."""
    network: float
    """Bytes/s in one direction between nodes: one 400 Gb/s port per GPU is 50e9."""
    pcie: float
    """Bytes/s in one direction between the GPU and its host."""
    watts: float
    """Power limit of one GPU."""
    l2: int
    """Bytes of the L2 cache."""
    shared_memory: int
    """Bytes per block with opt-in."""
    verified: bool
    """A whole training step was compiled for it by this project's tests."""
    node: int = NODE
    """GPUs that share an NVLink domain."""

    @property
    def usable(self) -> int:
        """Bytes of device memory that a program may take."""
        return int(self.hbm * MEMORY_FRACTION)

    def config(self) -> str:
        """Returns XLA's GpuTargetConfigProto in text format.

        Its fields are in xla/stream_executor/device_description.proto.
        """
        fields = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": self.shared_memory + 1024,
            "threads_per_core_limit": 2048,
            "core_count": self.cores,
            "fpus_per_core": 128 if self.capability >= (9, 0) else 64,
            "block_dim_limit_x": 2147483647,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": int(self.hbm_bandwidth),
            "l2_cache_size": self.l2,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.hbm,
            "shared_memory_per_block_optin": self.shared_memory,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        lines = "".join(f"  {name}: {value}\n" for name, value in fields.items())
        major, minor = self.capability
        return (
            f"gpu_device_info {{\n{lines}"
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 }\n"
            f'device_description_str: "{self.description}"\n'
            # Without a runtime version XLA silently turns fp8 matmuls into bf16 ones.
            "runtime_version { major: 13 minor: 0 }\n"
        )


_HOPPER_FLOPS = {"bf16": 989.4e12, "f16": 989.4e12, "f8": 1979e12, "f32": 67e12}

_H100 = Target(
    name="h100",
    description="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    clock_ghz=1.98,
    hbm=84_978_434_048,
    hbm_bandwidth=3.352e12,
    flops=_HOPPER_FLOPS,
    nvlink=450e9,
    network=50e9,
    pcie=64e9,
    watts=700,
    l2=50 << 20,
    shared_memory=232_448,
    verified=True,
)
_H200 = dataclasses.replace(
    _H100,
    name="h200",
    description="NVIDIA H200",
    hbm=150_109_880_320,
    hbm_bandwidth=4.8e12,
)
_A100 = Target(
    name="a100",
    description="NVIDIA A100-SXM4-80GB",
    capability=(8, 0),
    cores=108,
    clock_ghz=1.41,
    hbm=84_974_239_744,
    hbm_bandwidth=2.039e12,
    flops={"bf16": 312e12, "f16": 312e12, "f32": 19.5e12},
    nvlink=300e9,
    network=25e9,
    pcie=32e9,
    watts=400,
    l2=40 << 20,
    shared_memory=166_912,
    verified=False,
)
_B200 = Target(
    name="b200",
    description="NVIDIA B200",
    capability=(10, 0),
    cores=148,
    clock_ghz=1.965,
    hbm=191_126_044_672,
    hbm_bandwidth=8e12,
    flops={"bf16": 2250e12, "f16": 2250e12, "f8": 4500e12, "f32": 80e12},
    nvlink=900e9,
    network=50e9,
    pcie=64e9,
    watts=1000,
    l2=126 << 20,
    shared_memory=232_448,
    verified=False,
)
TARGETS = {target.name: target for target in (_H100, _H200, _A100, _B200)}
"""By name. h100: SXM 80 GB."""


def lower_for(
    target: Target | str, n_devices: int | None = None, extra: Sequence[str] = (), **axes: int
) -> Mesh:
    """Returns a mesh of GPUs that you do not have: `lower_for("h100", 1024, fsdp=16, tensor=8)`.

    They can be compiled for, but hold no array.

    Args:
      target: the GPU, or its name in TARGETS.
      n_devices: None: as many as `axes` multiply to. With a number, the axis given as -1, else
        `data`, takes what is left.
      extra: sizes of mesh axes that rules declare, as in MeshConfig.extra.
      axes: sizes of the mesh axes of MeshConfig, outermost first in the mesh; all others are 1.

    Raises LabError where the compiler for CUDA is not installed, the target is unknown, or the
    devices do not fill whole nodes; MeshError where the sizes do not multiply to n_devices.
    """
    for axis in axes:
        if axis not in AXES:
            raise LabError(f"no mesh axis {axis!r}{did_you_mean(axis, AXES)}")
    config = MeshConfig(**axes, extra=tuple(extra))
    sizes = config.sizes().values()
    if n_devices is None:
        if -1 in sizes:
            raise LabError("an axis of -1 takes what is left of n_devices, which is not given")
        n_devices = math.prod(sizes)
    elif -1 not in sizes and "data" not in axes:
        config = dataclasses.replace(config, data=-1)
    return make_mesh(config.resolve(n_devices), devices(target, n_devices))


def require_whole_nodes(target: Target, n_devices: int) -> None:
    """Raises LabError unless the devices fit one node or fill several.

    The message has the nearest numbers that do.
    """
    node = target.node
    if 1 <= n_devices <= node or (n_devices > node and n_devices % node == 0):
        return
    rounded = [n_devices // node * node, -(-n_devices // node) * node]
    fix = " or ".join(f"{n:,}" for n in rounded if n > 0) or f"{node:,}"
    raise LabError(
        f"{n_devices} devices do not fill whole nodes of {node} {target.name}; take {fix}"
    )


def h100(**axes: int) -> Mesh:
    """Returns a mesh of H100s that you do not have: `h100(data=2, tensor=4)` has eight."""
    return lower_for("h100", None, (), **axes)


def devices(target: Target | str, n_devices: int) -> list[Any]:
    """Returns `n_devices` GPUs that you do not have. Raises LabError as `lower_for` does."""
    if isinstance(target, str):
        if target not in TARGETS:
            raise LabError(f"no target {target!r}{did_you_mean(target, list(TARGETS))}")
        target = TARGETS[target]
    require_whole_nodes(target, n_devices)
    request = TopologyRequest(target.config(), n_devices, min(n_devices, target.node))
    return list(topology_of(request))


@dataclasses.dataclass(frozen=True)
class TopologyRequest:
    """The arguments with which JAX describes devices, the same in every process."""

    config: str
    """XLA's GpuTargetConfigProto in text format."""
    n_devices: int
    node: int
    """Devices in a node."""


def request_of(device: Any) -> TopologyRequest | None:
    """Returns the request that a device came from.

    None for a device of this machine, or that another library described.
    """
    return _REQUESTS.get(id(device.client))


_REQUESTS: dict[int, TopologyRequest] = {}
"""By the id of the devices' client, which the cache of `topology_of` keeps alive."""


@functools.cache
def topology_of(request: TopologyRequest) -> tuple[Any, ...]:
    """Returns the devices, where one process is one node, as in a cluster.

    They are cached, because JAX takes equal devices for different ones.
    """
    described = _describe(request)
    _REQUESTS[id(described[0].client)] = request
    return described


def _describe(request: TopologyRequest) -> tuple[Any, ...]:
    plugin = _compiler()
    describe = functools.partial(
        topologies.get_topology_desc,
        platform="cuda",
        target_config=request.config,
        topology=f"1x{request.n_devices // request.node}x{request.node}",
    )
    try:
        _compile_without_cudnn()
        try:
            return tuple(describe().devices)
        except NotImplementedError:
            # JAX looked for devices before this file was imported, and the plugin did not pass its
            # check then.
            importlib.import_module(plugin).initialize()
            return tuple(describe().devices)
    except jax.errors.JaxRuntimeError as error:
        raise LabError(f"XLA does not take this target: {error}") from error
    except RuntimeError as error:
        raise LabError(
            f"JAX's plugin for CUDA does not start: {error}; on a machine with an NVIDIA GPU it "
            "needs CUDA's libraries even where it only compiles. Set JAX_PLATFORMS=cpu in the "
            "environment to leave the GPU alone, or run: pip install 'jax[cuda13]'"
        ) from error


def _compile_without_cudnn() -> None:
    """Tells JAX's plugin for CUDA, where no NVIDIA GPU is, to start without cuDNN and its like.

    Those libraries run programs; nothing here runs one, and an installation that only compiles does
    not have them. Without this the plugin prints a traceback when JAX first looks for devices, and
    offers no GPUs to compile for. The alternative, jax_platforms="cpu", passes the check too, but
    it is the user's choice for a whole process.
    """
    has_gpu = any(any(_DEVICES.glob(pattern)) for pattern in ("nvidia*", "dxg"))
    if not has_gpu:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


# On import: whatever JAX does first after it, the plugin has nothing to complain of.
_compile_without_cudnn()


def _compiler() -> str:
    """Returns the module that makes XLA's compiler for CUDA known to JAX.

    Raises LabError with what to install, where JAX would fail deep inside or, worse, in the middle
    of a compilation.
    """
    for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        if importlib.util.find_spec(plugin):
            break
    else:
        raise CompilerMissing(
            "compiling for absent GPUs needs XLA's compiler for CUDA, which is not installed (it "
            "needs no GPU and no driver)",
            _install(),
        )
    distribution = plugin.replace("_", "-")
    installed = version(distribution)
    if installed != jax.__version__:
        raise LabError(
            f"{distribution} {installed} does not go with jax {jax.__version__}; run: pip install "
            f"'{distribution}=={jax.__version__}'"
        )
    if not (shutil.which("ptxas") or _has_ptxas_wheel()):
        raise CompilerMissing(
            "XLA's compiler for CUDA needs ptxas and libdevice, which are not installed", _install()
        )
    return plugin.replace("jax_", "jax_plugins.xla_").removesuffix("_plugin")


def _has_ptxas_wheel() -> bool:
    nvidia = importlib.util.find_spec("nvidia")
    for location in (nvidia and nvidia.submodule_search_locations) or ():
        for folder in _PTXAS_FOLDERS:
            if (Path(location) / folder / "bin/ptxas").exists():
                return True
    return False


def _install() -> str:
    packages = [repr(package).format(jax=jax.__version__) for package in _PACKAGES]
    return f"run: pip install {' '.join(packages)}"
