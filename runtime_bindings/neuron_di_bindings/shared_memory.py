"""Memory that two processes of one host can map: an anonymous file (Linux memfd).

It has no name in any file system, so a killed process leaves nothing behind. A process of
the same user maps it through the owner's descriptor table, /proc/PID/fd/FD, read-only. Its
size is sealed: a reader of pages that the owner cut off would be killed by SIGBUS.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import stat

# Linux 5.14; not in the mmap module of Python 3.11.
_POPULATE_BYTES = 16 << 20
_STAT_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_segment(
    label: str, size_bytes: int, *, is_touched: bool = True
) -> tuple[int, mmap.mmap]:
    """A zeroed segment of this size: (descriptor, writable map). The caller owns both.

    Every page is touched now, because a first touch costs several times a copy; OSError when the
    memory is not there. Without `is_touched` no page is there before its first use.
    """
    fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        view = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if is_touched:
            _populate(view)
    except (OSError, ValueError, OverflowError):
        os.close(fd)
        raise
    return fd, view


def create_private(size_bytes: int) -> mmap.mmap:
    """As a segment, but of this process alone."""
    view = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _populate(view)
    return view


def _populate(view: mmap.mmap) -> None:
    try:
        # In pieces: each call holds the interpreter lock, and others must run meanwhile.
        for start in range(0, len(view), _POPULATE_BYTES):
            view.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, len(view) - start))
    except OSError as error:
        if error.errno != errno.EINVAL:  # the memory is not there: touching it would kill us
            raise
        for offset in range(0, len(view), mmap.PAGESIZE):  # an older kernel
            view[offset] = 0


def open_peer_segment(pid: int, fd: int, size_bytes: int) -> mmap.mmap:
    """Map another process's segment read-only. The caller owns the map. Where every page is there,
    all are mapped at once; where the owner has left some out, none is made.

    OSError when the process or descriptor is gone, is not this user's, or is not a memfd sealed
    at exactly this size: a peer's numbers must not make us open anything else.
    """
    if pid <= 0 or fd < 0 or size_bytes <= 0:
        raise OSError(f"not a segment: pid {pid}, descriptor {fd}, {size_bytes} bytes")
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith("/memfd:"):
        raise OSError(f"descriptor {fd} of process {pid} is not shared memory")
    local_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(local_fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size_bytes:
            raise OSError(f"segment of process {pid} has {found.st_size} bytes, not {size_bytes}")
        if not fcntl.fcntl(local_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError(f"segment of process {pid} may shrink")
        view = mmap.mmap(local_fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        if found.st_blocks * _STAT_BLOCK_BYTES >= size_bytes:  # else a read makes what is not there
            _populate_read(view)
        return view
    finally:
        os.close(local_fd)


def _populate_read(view: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # an older kernel maps each page at its first read
        # In pieces: each call holds the interpreter lock, and others must run meanwhile.
        for start in range(0, len(view), _POPULATE_BYTES):
            view.madvise(_MADV_POPULATE_READ, start, min(_POPULATE_BYTES, len(view) - start))
