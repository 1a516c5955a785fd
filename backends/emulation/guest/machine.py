# SPDX-License-Identifier: Apache-2.0
"""A machine with an RDMA device: Debian's kernel under emulation, over this machine's own files.

The guest sees this machine's root directory; what it writes there is lost, but for `Guest.folder`, which both share
under the same path.  It has one network card that reaches nothing, and on it soft-RoCE: the RDMA device ``rxe0`` at
`ADDRESS`, so that real verbs run between processes of the guest.  Emulated processors move tens of MB/s.

Nothing outlives the `with` block of `boot`: not the emulator, which the kernel ends also when this process is
killed, and not the folder, which in that case the next `boot` removes.  Nothing is mounted on the host.
"""

import contextlib
import fcntl
import hashlib
import lzma
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdsim.core.errors import BackendUnavailable, TransferError

ADDRESS = "10.8.0.1"
DEVICE = "rxe0"
PATIENCE = 3.0 * float(os.environ.get("PDSIM_PATIENCE", "1"))
"""By how much longer than on two idle cores one should wait in the guest; assumed."""

PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "setpriv": "util-linux", "rdma": "iproute2"}
PROVIDER = "libibverbs/librxe-rdmav*.so"  # of the package ibverbs-providers
CPU = "max,-erms,-fsrm,-la57"  # what it leaves out is fast in silicon and slow under emulation
KERNEL = "tsc=reliable clocksource=tsc no5lvl clearcpuid=rep_good"  # likewise; it would tell the time by an HPET
PREFIX = "pdsim-guest-"
FRESH = 600.0  # seconds within which whoever made a folder has locked it
TAIL = 2000  # characters of the console that go into an error


class GuestFailed(TransferError):
    """The guest did not start, has ended, or did not answer in time."""


@dataclass(frozen=True)
class Completed:
    """The end of a command in the guest: its exit *status* (124: out of time), and its output."""

    status: int
    output: str


class Guest:
    """A running guest; `boot` makes one.  Commands go over its second serial port, one at a time.

    Raise `GuestFailed` if the guest ends or does not answer 30 s after the command's own limit.
    """

    def __init__(self, folder: Path, control: socket.socket) -> None:
        self.folder = folder
        self._control = control
        self._received = b""
        self._count = 0

    def run(
        self, *command: str, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> Completed:
        """Run *command* as root in the guest for *timeout* seconds at most, with *env* added to its environment."""
        self._count += 1
        name = f"command{self._count}"
        place = self.folder / name
        place.mkdir()
        lines = [f"cd {shlex.quote(str(cwd or Path.cwd()))}"]
        lines += [f"export {key}={shlex.quote(value)}" for key, value in (env or {}).items()]
        lines += [f"exec timeout --kill-after=5 {timeout:g} {shlex.join(command)}"]
        (place / "command").write_text("\n".join(lines))
        status = self._told(f"run {name}", timeout)
        return Completed(int(status), (place / "output").read_text(errors="replace"))

    def ask(self, folder: str, text: str, timeout: float) -> str:
        """Write *text*, a line, to the FIFO ``jobs`` in *folder* of the guest; return the next line of ``answers``.

        It is "late" if none comes for *timeout* seconds.
        """
        self._count += 1
        return self._told(f"ask {self._count} {folder} {timeout:g} {text}", timeout)

    def _told(self, order: str, timeout: float) -> str:
        self._control.sendall(f"{order}\n".encode())
        _, _, answer = self._line(timeout + 30).partition(" ")
        return answer

    def until_ready(self, seconds: float) -> None:
        while self._line(seconds) != "ready":
            pass

    def _line(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            self._control.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                piece = self._control.recv(4096)
            except TimeoutError:
                raise GuestFailed(f"no answer from the guest within {seconds:g} s{self._tail()}") from None
            if not piece:
                raise GuestFailed(f"the guest has ended{self._tail()}")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace").strip()

    def _tail(self) -> str:
        console = self.folder / "console"
        return f"; its console:\n{console.read_text(errors='replace')[-TAIL:]}" if console.exists() else ""


@contextlib.contextmanager
def boot(startup: float = 180.0, memory: int = 3072) -> Iterator[Guest]:
    """Yield a guest with *memory* MiB that is ready within *startup* seconds; end it on the way out.

    Raise `BackendUnavailable` if this machine lacks what it needs, and `GuestFailed` if it does not come up.
    """
    if missing := missing_requirements():
        raise BackendUnavailable(missing)
    image = _image()
    with contextlib.ExitStack() as stack:
        _sweep()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
        stack.callback(os.close, _lock(folder))
        near, far = socket.socketpair()
        stack.enter_context(near)
        with far:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *_qemu(image, folder, far.fileno(), memory)],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=(folder / "qemu").open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the tests, which end the guest
            )
        stack.callback(_end, process)
        guest = Guest(folder, near)
        guest.until_ready(startup)
        yield guest


def missing_requirements() -> str:
    """Return what to install for the guest, or nothing if all is there."""
    missing = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if not any(Path("/usr/lib").glob(f"*/{PROVIDER}")):
        missing.append("ibverbs-providers")
    packages = " ".join(missing)
    return f"the RDMA guest needs: apt-get install -y --no-install-recommends {packages}" if packages else ""


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is in use, another's, or just gone
            if time.time() - folder.stat().st_mtime > FRESH:
                os.close(_lock(folder))
                shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)


def _qemu(image: Path, folder: Path, control: int, memory: int) -> list[str]:
    shared = f"local,path={folder},mount_tag=shared,security_model=none"
    root = "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap"
    return [
        *("qemu-system-x86_64", "-nodefaults", "-display", "none", "-no-reboot"),
        *("-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", str(min(4, os.cpu_count() or 1)), "-m", str(memory)),
        *("-netdev", "hubport,id=net,hubid=0", "-device", "virtio-net-pci,netdev=net,romfile="),
        *("-virtfs", root, "-virtfs", shared),
        *("-serial", f"file:{folder}/console"),
        *("-chardev", f"socket,id=control,fd={control}", "-serial", "chardev:control"),
        *("-kernel", f"{image}/vmlinuz", "-initrd", f"{image}/initrd.xz"),
        *("-append", f"console=ttyS0 quiet panic=-1 {KERNEL} pdsim.shared={folder}"),
    ]


INIT = Path(__file__).with_name("init")
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "overlay", "ib_uverbs", "crc32_generic", "rdma_rxe")
FOLDERS = ("bin", "dev", "lower", "modules", "proc", "root", "sys", "upper")
DOWNLOAD = 600.0  # seconds that a package may take to arrive, and any other step of the making


def _image() -> Path:
    # The folder of the image in the user's cache; made there, in a minute, if it is absent or older than this code.
    key = hashlib.sha256(INIT.read_bytes() + Path(__file__).read_bytes()).hexdigest()[:16]
    folder = cache() / f"rdma-guest-{key}"
    if not folder.is_dir():
        _make(folder)
    return folder


def cache() -> Path:
    """Return the user's cache of pdsim."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdsim"


def _make(folder: Path) -> None:
    # It is made beside its place and renamed, so two processes may make it at once and none sees half of it.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".rdma-guest-", dir=folder.parent) as name:
        work = Path(name)
        kernel, busybox = work / "kernel", work / "busybox"
        package = re.search(r"Depends: (linux-image-\S+)", command("apt-cache", "depends", "linux-image-amd64"))
        if not package:
            raise BackendUnavailable("apt knows no linux-image-amd64: run apt-get update, on Debian for x86-64")
        _unpack(package[1], kernel)
        _unpack("busybox-static", busybox)
        made = work / "image"
        made.mkdir()
        shutil.copy(next(kernel.glob("boot/vmlinuz-*")), made / "vmlinuz")
        (made / "initrd.xz").write_bytes(_archive(kernel, next(busybox.glob("**/bin/busybox"))))
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise


def _unpack(package: str, folder: Path) -> None:
    folder.mkdir()
    command("apt-get", "download", package, cwd=folder)
    command("dpkg-deb", "--extract", str(next(folder.glob("*.deb"))), str(folder))


def command(*words: str, cwd: Path | None = None, about: str = "the guest's files are Debian packages") -> str:
    """Run *words* for `DOWNLOAD` seconds at most and return what is printed.

    Raise `BackendUnavailable`, with what it is *about* or with the end of the output, if that fails.
    """
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=DOWNLOAD, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{about}: {error}") from error
    if done.returncode:
        raise BackendUnavailable(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


def _archive(kernel: Path, busybox: Path) -> bytes:
    shipped = {_plain(path.name.partition(".")[0]): path for path in kernel.glob("lib/modules/*/kernel/**/*.ko*")}
    modules: dict[str, bytes] = {}
    for module in MODULES:
        _load(_plain(module), shipped, modules)
    files = {"init": INIT.read_bytes(), "bin/busybox": busybox.read_bytes()}
    files |= {f"modules/{name}": data for name, data in modules.items()}
    files["modules/order"] = "".join(f"{name}\n" for name in modules).encode()
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in FOLDERS]
    entries += [(name, stat.S_IFREG | 0o755, data) for name, data in files.items()]
    # the kernel knows no other check
    return lzma.compress(b"".join(_cpio(entries)), check=lzma.CHECK_CRC32, preset=1)


def _plain(module: str) -> str:
    return module.replace("-", "_")


def _load(module: str, shipped: dict[str, Path], modules: dict[str, bytes]) -> None:
    if module in modules or module not in shipped:
        return
    data = shipped[module].read_bytes()
    if shipped[module].suffix == ".xz":
        data = lzma.decompress(data)
    needs = re.search(rb"\0depends=([^\0]*)\0", data)
    for need in needs[1].decode().split(",") if needs else ():
        _load(_plain(need), shipped, modules)
    modules[module] = data


def _cpio(entries: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    for number, (name, mode, data) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        yield head + bytes(-len(head) % 4)
        yield data + bytes(-len(data) % 4)
