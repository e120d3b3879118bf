"""One copy of some bytes in huge pages, for every process of this user on this host.

The copy is a memory file without a name (memfd), sealed once it is filled, so that nobody can change or shorten it. A
small file under the temporary folder lists who holds it; whoever comes next opens it through /proc. It is gone when the
last holder is.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import stat
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_READ, _MADV_COLLAPSE = 22, 25
_STEP = 256 << 20  # bytes advised, filled or collapsed at once

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class SharedBytes:
    """A mapped copy; `bytes`: uint8 [size], not to be written. `filled`: whether this process made the copy.

    The mapping lives as long as any view of `bytes` does.
    """

    def __init__(self, fd: int, size: int, filled: bool) -> None:
        self.filled = filled
        self._address, self._mapped = _map(fd, size, mmap.PROT_READ)
        for begin in range(0, self._mapped, _STEP):
            _advise(self._address + begin, min(_STEP, self._mapped - begin), _MADV_POPULATE_READ)
        array = _array(self._address, size)
        # Not at exit, where a thread may still read; the kernel releases it then.
        weakref.finalize(array, _release, fd, self._address, self._mapped).atexit = False
        self.bytes = torch.frombuffer(array, dtype=torch.uint8)

    @property
    def huge_page_share(self) -> float:
        """Part of the mapped pages that are huge ones, 0 to 1, as the kernel says."""
        return _huge_bytes(self._address) / self._mapped


def share(key: str, size: int, fill: Callable[[Tensor], None]) -> SharedBytes:
    """The copy named `key`, of `size` bytes: that of another process, or a new one that `fill` writes.

    key: letters, digits and '-' alone; must tell apart all that differs in content. Waits while another process fills.
    Raises OSError where memory cannot be had, and whatever `fill` raises.
    """
    with _Holders(key) as holders:
        fd = holders.open(size)
        filled = fd is None
        if fd is None:
            fd = _make(key, size, fill)
        holders.add(fd)
    return SharedBytes(fd, size, filled)


def is_held(key: str, size: int) -> bool:
    """Whether `share` would find a copy; waits while another process fills it."""
    with _Holders(key) as holders:
        fd = holders.open(size)
    if fd is not None:
        os.close(fd)
    return fd is not None


def _make(key: str, size: int, fill: Callable[[Tensor], None]) -> int:
    fd = os.memfd_create(_name(key), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, -(-size // HUGE_PAGE) * HUGE_PAGE)
        address, mapped = _map(fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
        try:
            fill(torch.frombuffer(_array(address, size), dtype=torch.uint8))
            if mapped > _STEP:
                logger.info("%s: joining its pages into huge ones", key)
            for begin in range(0, mapped, _STEP):
                # For where large pages were scarce, or the kernel gives shared memory none by itself.
                _advise(address + begin, min(_STEP, mapped - begin), _MADV_COLLAPSE)
        finally:
            _libc.munmap(address, mapped)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class _Holders:
    """The list of who holds a copy, locked while entered."""

    def __init__(self, key: str) -> None:
        self._key, self._path = key, _folder() / key

    def __enter__(self) -> _Holders:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("Waiting for another process that fills %s", self._key)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        lines = os.pread(self._fd, 1 << 20, 0).decode().splitlines()
        self._lines = [line for line in lines if self._holds(line)]
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)  # and with it the lock

    def open(self, size: int) -> int | None:
        """The copy of any of them, if it is whole and sealed."""
        for line in self._lines:
            try:
                fd = os.open(_descriptor(line), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # it ended meanwhile
                continue
            if os.fstat(fd).st_size >= size and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS:
                return fd
            os.close(fd)
        return None

    def _holds(self, line: str) -> bool:
        """Whether the process that a line names has a memory file of our name: its number may be another's by now."""
        try:
            return os.readlink(_descriptor(line)) == f"/memfd:{_name(self._key)} (deleted)"
        except OSError:
            return False

    def add(self, fd: int) -> None:
        """This process holds it too."""
        text = "\n".join([*self._lines, f"{os.getpid()} {fd}", ""]).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)


def _folder() -> Path:
    """Ours alone: what others could write there would be taken for the tables."""
    folder = Path(tempfile.gettempdir()) / f"sglang-ced-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder}: must be a folder of this user that no other can enter; remove it")
    return folder


def _descriptor(line: str) -> str:
    """'process descriptor' -> where Linux shows it."""
    return f"/proc/{line.replace(' ', '/fd/')}"


def _name(key: str) -> str:
    return f"sglang-ced-{key}"


def _map(fd: int, size: int, protection: int) -> tuple[int, int]:
    """Map whole huge pages at an address that huge pages can begin at: (address, bytes)."""
    mapped = -(-size // HUGE_PAGE) * HUGE_PAGE
    room = mapped + HUGE_PAGE
    base = _checked(_libc.mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0))
    address = -(-base // HUGE_PAGE) * HUGE_PAGE
    map_fixed = 0x10
    _checked(_libc.mmap(address, mapped, protection, mmap.MAP_SHARED | map_fixed, fd, 0))
    if address > base:
        _libc.munmap(base, address - base)
    if base + room > address + mapped:
        _libc.munmap(address + mapped, base + room - address - mapped)
    _advise(address, mapped, mmap.MADV_HUGEPAGE)
    return address, mapped


def _checked(address: int | None) -> int:
    if address is None or address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
    return address


def _advise(address: int, size: int, advice: int) -> None:
    """Advice that the kernel does not take is no error: `huge_page_share` says what came of it."""
    _libc.madvise(address, size, advice)


def _array(address: int, size: int) -> Any:
    return (ctypes.c_uint8 * size).from_address(address)


def _release(fd: int, address: int, mapped: int) -> None:
    _libc.munmap(address, mapped)
    os.close(fd)


def _huge_bytes(address: int) -> int:
    """Bytes of the mapping that begins at `address` which huge pages map."""
    inside, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            inside = int(first.partition("-")[0], 16) == address
        elif inside and first in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
            total += int(rest.split()[0]) * 1024
    return total
