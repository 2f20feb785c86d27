"""What each backend is built with: cmake options, tools, and what its wheel contains. Facts only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from toolkit.errors import BuildError


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A program or a set of files needed to build, and where to get it."""

    name: str
    executables: tuple[str, ...] = ()  # names on PATH, the first found is used
    files: tuple[str, ...] = ()  # patterns below a prefix such as /usr, one of which must match
    contains: str = ""  # what the file found must have in it: one that is too old has not
    apt: str | None = None  # package of Debian and Ubuntu
    package: str | None = None  # Python package that carries the program; None when none does
    elsewhere: str | None = None  # what to install where no package manager has it, or has one too old
    variable: str | None = None  # environment variable that names another program, or another prefix
    minimum: tuple[int, ...] = ()  # lowest version that works


@dataclass(frozen=True, kw_only=True)
class Architectures:
    """How a GPU compiler is told which GPUs to make code for."""

    define: str  # cmake cache entry, a list
    syntax: str  # regular expression of one entry
    example: str
    detect: tuple[str, ...]  # command that prints the GPUs of this machine
    detected: str  # regular expression of one printed line; its groups, joined, are the entry
    known: tuple[str, ...] = ()  # command that prints what the compiler can make
    known_line: str = ""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute, in one wheel. Every wheel can compute on the CPU too."""

    name: str
    label: str  # end of the wheel's local version label; {tool} stands for that tool's version, 13.0 as 130
    systems: tuple[str, ...]  # platform.system() where it can be built
    defines: Mapping[str, str]  # cmake cache entries, the same for both arms
    tools: tuple[Tool, ...]
    libraries: tuple[str, ...]  # cmake targets whose library is in the wheel, no more and no fewer
    registers: tuple[str, ...]  # names in ggml's backend registry
    excludes: tuple[str, ...] = ()  # patterns of libraries that come with a driver or an SDK: never in the wheel
    selects: tuple[str, ...] = ()  # environment variables that choose among its devices, the usual one first
    # Libraries only a machine with the device has -> cmake cache entry with the stand-in it was linked with.
    drivers: Mapping[str, str] = field(default_factory=dict)
    architectures: Architectures | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """Patterns of libraries of the system it may need beyond the C and C++ runtime."""
        return (*OPENMP, *self.excludes)


# Part of a portable wheel; a wheel for this machine takes the system's.
OPENMP = ("libgomp.so.1", "libomp.so.5")

_CPU = Backend(
    name="cpu",
    label="cpu",
    # On macOS the binding switches Metal on whatever it is told.
    systems=("Linux", "Windows"),
    defines={
        "LLAVA_BUILD": "OFF",
        # A wheel cannot hold links, so versioned names become copies, and a program that opens two of them
        # has two states of one library. Without versions each library is one file under one name.
        "CMAKE_PLATFORM_NO_VERSIONED_SONAME": "ON",
        "GGML_NATIVE": "ON",  # an A/B runs where it was built
    },
    tools=(
        Tool(name="C compiler", executables=("cc", "gcc", "clang"), apt="gcc", variable="CC"),
        Tool(name="C++ compiler", executables=("c++", "g++", "clang++"), apt="g++", variable="CXX"),
        Tool(name="cmake", executables=("cmake",), apt="cmake", package="cmake", minimum=(3, 21)),
        Tool(name="ninja", executables=("ninja",), apt="ninja-build", package="ninja", minimum=(1, 5)),
        Tool(name="git", executables=("git",), apt="git"),
    ),
    libraries=("llama", "ggml", "ggml-base", "ggml-cpu"),
    registers=("CPU",),
)

_CUDA = "the whole CUDA toolkit (package cuda-toolkit of NVIDIA's repository), with its bin on PATH"
_ROCM = "ROCm 6.1 or newer (package rocm-hip-sdk of AMD's repository), with its bin on PATH"


def _in_cuda(library: str, windows: str) -> tuple[str, ...]:
    """Where toolkits of NVIDIA, of Debian and of conda have it."""
    folders = ("lib*", "lib*/*", "targets/*/lib", "cuda*/lib*", "cuda*/targets/*/lib")
    return (*(f"{folder}/{library}" for folder in folders), f"lib/x64/{windows}")


# What each adds to the CPU backend. Options that would otherwise depend on what else is installed are set,
# so that a wheel needs the same libraries wherever it was built.
_ADDED = (
    Backend(
        name="cuda",
        label="cuda{nvcc}",
        systems=("Linux", "Windows"),
        defines={"GGML_CUDA": "ON", "GGML_CUDA_NCCL": "OFF"},
        tools=(
            Tool(
                name="nvcc",
                executables=("nvcc",),
                elsewhere=_CUDA,
                variable="CUDACXX",
                minimum=(11, 7),
            ),
            # A toolkit can come in parts; each of these is one.
            Tool(name="cuBLAS", files=_in_cuda("libcublas.so", "cublas.lib"), elsewhere=_CUDA, variable="CUDA_PATH"),
            Tool(
                name="CUDA driver stub",
                files=_in_cuda("stubs/libcuda.so", "cuda.lib"),
                elsewhere=_CUDA,
                variable="CUDA_PATH",
            ),
        ),
        libraries=("ggml-cuda",),
        registers=("CUDA",),
        excludes=(
            *("libcuda.so.*", "libcudart.so.*", "libcublas.so.*", "libcublasLt.so.*"),
            *("nvcuda.dll", "cudart64_*.dll", "cublas64_*.dll", "cublasLt64_*.dll"),
        ),
        selects=("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
        drivers={"libcuda.so.1": "CUDA_cuda_driver_LIBRARY"},
        architectures=Architectures(
            define="CMAKE_CUDA_ARCHITECTURES",
            syntax=r"(\d{2,3})[af]?(?:-real|-virtual)?",
            example="90",
            detect=("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"),
            detected=r"(\d+)\.(\d+)",
            known=("nvcc", "--list-gpu-arch"),
            known_line=r"compute_(\d+)",
        ),
    ),
    Backend(
        name="vulkan",
        label="vulkan",
        systems=("Linux", "Windows"),
        defines={"GGML_VULKAN": "ON"},
        tools=(
            Tool(name="glslc", executables=("glslc",), apt="glslc"),
            Tool(
                name="Vulkan headers",
                files=("include/vulkan/vulkan_core.h", "Include/vulkan/vulkan_core.h"),
                contains="VkLayerSettingEXT",
                apt="libvulkan-dev",
                # its libvulkan-dev is headers and a link; `dpkg -x libvulkan-dev_….deb FOLDER` unpacks it anywhere
                elsewhere="the Vulkan SDK 1.3.272 or newer, with VULKAN_SDK set to its folder "
                "(or libvulkan-dev of Debian 13, unpacked, with VULKAN_SDK=FOLDER/usr)",
                variable="VULKAN_SDK",
            ),
            Tool(
                name="Vulkan loader",
                files=("lib/*/libvulkan.so", "lib*/libvulkan.so", "Lib/vulkan-1.lib"),
                apt="libvulkan-dev",
                variable="VULKAN_SDK",
            ),
            Tool(
                name="SPIR-V headers",
                files=("share/cmake/SPIRV-Headers/*.cmake", "lib/cmake/SPIRV-Headers/*.cmake"),
                apt="spirv-headers",
                variable="VULKAN_SDK",
            ),
        ),
        libraries=("ggml-vulkan",),
        registers=(),  # registers only where a Vulkan driver answers
        excludes=("libvulkan.so.1", "vulkan-1.dll"),
        # without the first, devices that compute on the CPU are left out
        selects=("GGML_VK_VISIBLE_DEVICES", "MESA_VK_DEVICE_SELECT", "VK_DRIVER_FILES", "VK_ICD_FILENAMES"),
    ),
    Backend(
        name="metal",
        label="metal",
        systems=("Darwin",),
        defines={"GGML_METAL": "ON", "GGML_METAL_EMBED_LIBRARY": "ON"},
        tools=(Tool(name="Xcode tools", executables=("xcrun",), elsewhere="xcode-select --install"),),
        libraries=("ggml-metal", "ggml-blas"),
        registers=("MTL", "BLAS"),
    ),
    Backend(
        name="hip",
        label="hip{hipcc}",
        systems=("Linux",),
        defines={"GGML_HIP": "ON", "GGML_HIP_RCCL": "OFF"},
        tools=(
            Tool(
                name="hipcc",
                executables=("hipcc",),
                elsewhere=_ROCM,
                minimum=(6, 1),
            ),
            Tool(
                name="hipBLAS and rocBLAS",
                files=("lib*/cmake/hipblas/hipblas-config.cmake", "lib/*/cmake/hipblas/hipblas-config.cmake"),
                elsewhere=_ROCM,
                variable="ROCM_PATH",
            ),
        ),
        libraries=("ggml-hip",),
        registers=("ROCm",),
        excludes=("libamdhip64.so.*", "libhipblas.so.*", "librocblas.so.*"),
        # the runtime follows CUDA's name too, and HSA_OVERRIDE_GFX_VERSION decides which code a device gets
        selects=(
            *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "CUDA_VISIBLE_DEVICES"),
            "HSA_OVERRIDE_GFX_VERSION",
        ),
        architectures=Architectures(
            define="GPU_TARGETS",
            syntax=r"(gfx[0-9a-f]+)(?::\w+[+-])*",
            example="gfx1100",
            detect=("rocm_agent_enumerator",),
            detected=r"(gfx[1-9a-f][0-9a-f]+)",
        ),
    ),
    Backend(
        name="rpc",
        label="rpc",
        systems=("Linux", "Darwin", "Windows"),
        defines={"GGML_RPC": "ON", "GGML_RPC_RDMA": "OFF"},
        tools=(),
        libraries=("ggml-rpc",),
        registers=("RPC",),
    ),
)

# Words of other projects' labels.
_ALIASES = {"cu": "cuda", "rocm": "hip"}

BACKENDS = {part.name: part for part in (_CPU, *_ADDED)}


def get_backend(name: str) -> Backend:
    """A backend, or several in one wheel joined by `+`, such as cuda+rpc; cpu is in each and need not be named.

    The order of the names does not matter. Raises BuildError for a name that is not in the table.
    """
    asked = name.split("+")
    if unknown := [part for part in asked if part not in BACKENDS]:
        raise BuildError(
            f"unknown backend {', '.join(map(repr, unknown))}",
            where=f"--backend {name}",
            hint=f"use one of {', '.join(BACKENDS)}, or several such as cuda+rpc",
        )
    joined = _CPU
    for part in _ADDED:
        if part.name in asked:
            joined = _join(joined, part)
    return joined


def build_command(backend: str, arm: str = "both") -> str:
    """The command that builds the wheel of one arm, baseline or patched, or of both."""
    return f"moe-madv build --backend {backend} --arm {arm}"


def backend_of_label(label: str | None) -> Backend | None:
    """The backend that a local version label such as `moe1.cuda130.rpc.v3` or `cu124` speaks of, None for none."""
    words = [re.sub(r"\d+$", "", word) for word in (label or "").split(".")]
    names = [_ALIASES.get(word, word) for word in words]
    found = [name for name in names if name in BACKENDS]
    try:
        return get_backend("+".join(found)) if found else None
    except BuildError:  # two that never come together
        return None


def _join(base: Backend, part: Backend) -> Backend:
    systems = tuple(system for system in base.systems if system in part.systems)
    if base is _CPU:
        systems = systems or part.systems  # Metal: the one backend of a system where there is none without it
        name, label = part.name, part.label
    else:
        name, label = f"{base.name}+{part.name}", f"{base.label}.{part.label}"
    if not systems:
        raise BuildError(f"no system has both {base.name} and {part.name}", hint="build them one after the other")
    if base.architectures and part.architectures:
        raise BuildError(
            f"{base.name} and {part.name} cannot be in one wheel: they define the same functions",
            hint="build them one after the other",
        )
    return Backend(
        name=name,
        label=label,
        systems=systems,
        defines={**base.defines, **part.defines},
        tools=base.tools + part.tools,
        libraries=base.libraries + part.libraries,
        registers=base.registers + part.registers,
        excludes=base.excludes + part.excludes,
        selects=base.selects + part.selects,
        drivers={**base.drivers, **part.drivers},
        architectures=base.architectures or part.architectures,
    )
