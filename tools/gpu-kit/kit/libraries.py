"""Finds NVIDIA's libraries and headers, and links the ones that fit the driver into one folder."""

import glob
import os
import re
import subprocess
import sys
from pathlib import Path

NAMES = ["nvrtc", "cublasLt", "nccl", "cupti"]
# Calls the version function of a library and prints the version.
VERSION = """
import ctypes, sys
numbers = [ctypes.c_int() for _ in range(int(sys.argv[3]))]
code = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])(*map(ctypes.byref, numbers))
print(*(number.value for number in numbers)) if code == 0 else sys.exit(code)
"""
WITH_TORCH = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
PACKAGES = "import nvidia; print(*nvidia.__path__, sep='\\n')"


class Libraries:
    """NVIDIA's libraries that the steps use."""

    def __init__(self, work):
        self.work, self.chosen, self.found = work, {}, []
        self.driver = self.driver_folder = self.headers = self.python = None

    @classmethod
    def find(cls, kit):
        self = cls(kit.work)
        pythons = candidates()
        self.python = next((python for python in pythons if answers(python, WITH_TORCH)), None)
        packages = [folder for python in pythons for folder in package_folders(python)]
        roots = toolkits()
        folders = search_folders(packages, roots)
        self.find_driver(folders)
        for name in NAMES:
            self.choose(name, folders)
        self.link()
        self.find_headers(packages, roots)
        return self

    def find_driver(self, folders):
        for path in ["libcuda.so.1", *files("libcuda.so.1", folders)]:
            version = version_of(path, "cuDriverGetVersion", 1)
            if version:
                self.driver = version[0]
                self.driver_folder = os.path.dirname(path) or None
                return

    def choose(self, name, folders):
        """Chooses the newest NVRTC that the driver supports, and the first file that suits it of each other library."""
        found = files(f"lib{name}.so*", folders)
        self.found += [(name, path, self.cuda_of(name, path)) for path in found]
        own = [(path, cuda) for of, path, cuda in self.found if of == name]
        if name == "nvrtc":
            fits = [(path, cuda) for path, cuda in own if cuda and cuda <= (self.driver or 1 << 30)]
            own = sorted(fits, key=lambda pair: -pair[1]) or own
        elif "nvrtc" in self.chosen and name in ("cublasLt", "cupti"):
            major = (self.chosen["nvrtc"][1] or 0) // 1000
            own.sort(key=lambda pair: pair[1] // 1000 != major if pair[1] else True)
        if own:
            self.chosen[name] = own[0]

    @staticmethod
    def cuda_of(name, path):
        """Returns the CUDA version of a library in the format of the driver: 12090 is 12.9."""
        if name == "nvrtc":
            version = version_of(path, "nvrtcVersion", 2)
            return 1000 * version[0] + 10 * version[1] if version else None
        number = re.search(r"\.so\.(\d+)", os.path.realpath(path))
        return 1000 * int(number.group(1)) if number and name != "nccl" else None

    def link(self):
        """Links the chosen libraries into a folder, so that programs find these libraries first."""
        folder = self.work / "lib"
        renew(folder)
        for name, (path, _) in self.chosen.items():
            real = os.path.realpath(path)
            names = {f"lib{name}.so", os.path.basename(path), os.path.basename(real)}
            names |= {link for link in os.listdir(os.path.dirname(path)) if link.startswith(f"lib{name}.so.")}
            for link in names:
                make_link(real, folder / link)
            for part in glob.glob(f"{glob.escape(os.path.dirname(real))}/lib{name}-builtins.so*"):
                make_link(part, folder / os.path.basename(part))

    def find_headers(self, packages, roots):
        """Links the headers of one CUDA version into a folder. In wheels, the headers are in several folders."""
        wheels = [Path(folder) for folder in packages]
        parts = [["cu13/include"], ["cuda_runtime/include", "cuda_nvcc/include"]]
        sets = [[Path(root) / "include"] for root in roots] + [
            [wheel / part for part in group] for wheel in wheels for group in parts
        ]
        sets = [group for group in sets if (group[0] / "cuda_fp16.h").is_file()]
        major = (self.chosen.get("nvrtc", (None, None))[1] or 0) // 1000
        sets.sort(key=lambda group: cuda_of_headers(group[0]) // 1000 != major)
        if not sets:
            return
        crt = [wheel.parent / "triton/backends/nvidia/include" for wheel in wheels]
        folder = self.work / "cuda/include"
        renew(folder)
        for part in [*sets[0], *crt]:
            for header in sorted(part.iterdir()) if part.is_dir() else []:
                make_link(header, folder / header.name)
        self.headers = sets[0][0]

    def environment(self):
        """Returns the environment variables that let a program find the chosen libraries."""
        folders = [str(self.work / "lib")]
        folders += [os.path.dirname(os.path.realpath(path)) for path, _ in self.chosen.values()]
        folders += [self.driver_folder] if self.driver_folder else []
        folders += filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
        environment = {"LD_LIBRARY_PATH": ":".join(dict.fromkeys(folders))}
        if self.headers:
            environment["CUDA_PATH"] = str(self.work / "cuda")
        return environment

    def missing(self):
        """Returns what kernels need and is missing. Programs from before `check-gpu` then computed garbage."""
        found = [("the driver", self.driver), ("NVRTC", "nvrtc" in self.chosen), ("the headers of CUDA", self.headers)]
        names = [name for name, there in found if not there]
        return f"not found: {', '.join(names)}" if names else None

    def lines(self):
        """Yields a report line for each library."""
        driver = f"CUDA {version_text(self.driver)}" if self.driver else "**libcuda.so.1 was not found**"
        yield f"- driver: {driver}"
        for name in NAMES:
            path, cuda = self.chosen.get(name, (None, None))
            version = f", CUDA {version_text(cuda)}" if cuda and name == "nvrtc" else ""
            text = f"`{path}`{version}" if path else "**not found**"
            yield f"- lib{name}: {text}"
        nvrtc = self.chosen.get("nvrtc", (None, None))[1]
        if nvrtc and self.driver and nvrtc > self.driver:
            yield "- **NVRTC is newer than the driver, which may refuse its kernels**: install an older NVRTC"
        yield f"- headers of CUDA: {f'`{self.headers}`' if self.headers else '**not found**'}"
        yield f"- Python with torch: {f'`{self.python}`' if self.python else 'none'}"
        others = [path for name, path, _ in self.found if path != self.chosen[name][0]]
        if others:
            yield f"- found and not used: {', '.join(f'`{path}`' for path in others)}"


def candidates():
    """Returns Python interpreters that may have NVIDIA's packages."""
    given = [os.environ.get("PYTHON"), sys.executable]
    folders = [os.environ.get("VIRTUAL_ENV"), "/opt/venv", "/opt/conda", ".venv", "/usr"]
    given += [f"{folder}/bin/python3" for folder in folders if folder]
    given += [f"{folder}/python3" for folder in os.environ.get("PATH", "").split(":")]
    return list(dict.fromkeys(python for python in given if python and os.path.isfile(python)))


def answers(python, program):
    try:
        done = subprocess.run([python, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.decode(errors="replace") or " ") if done.returncode == 0 else None


def package_folders(python):
    return (answers(python, PACKAGES) or "").split()


def toolkits():
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    roots += sorted(glob.glob("/usr/local/cuda-*"), reverse=True) + ["/opt/cuda", "/usr"]
    return list(dict.fromkeys(root for root in roots if root))


def search_folders(packages, roots):
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for package in packages:
        folders += sorted(glob.glob(f"{package}/*/lib")) + [f"{os.path.dirname(package)}/torch/lib"]
    for root in roots[:-1]:
        folders += [f"{root}/lib64", f"{root}/lib", f"{root}/extras/CUPTI/lib64"]
        folders += glob.glob(f"{root}/targets/*/lib")
    system = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"]
    folders += system + ["/usr/lib/wsl/lib", "/usr/local/nvidia/lib64"]
    return list(dict.fromkeys(folder for folder in folders if folder and os.path.isdir(folder)))


def files(pattern, folders):
    found = [path for folder in folders for path in sorted(glob.glob(f"{glob.escape(folder)}/{pattern}"))]
    found = [path for path in found if ".alt." not in path]
    return list({os.path.realpath(path): path for path in reversed(found)}.values())[::-1]


def version_of(path, function, numbers):
    """Returns the version that a library reports. The library is loaded in a separate process."""
    command = [sys.executable, "-c", VERSION, path, function, str(numbers)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        return [int(number) for number in done.stdout.split()] if done.returncode == 0 else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def cuda_of_headers(folder):
    try:
        text = (folder / "cuda.h").read_text(errors="replace")
    except OSError:
        return 0
    found = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", text)
    return int(found.group(1)) if found else 0


def version_text(cuda):
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def renew(folder):
    """Creates a folder for links, and removes the links of an earlier call."""
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        link.unlink()


def make_link(target, link):
    if not link.is_symlink():
        link.symlink_to(target)
