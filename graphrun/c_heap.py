"""The C library's heap, from which PyTorch takes CPU tensors: trim it, and keep its fragments away.

Needs glibc; elsewhere nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

from graphrun.systems import huge_pages_mode, tensors_get_huge_pages
from graphrun.units import KIB, MIB, PAGE_BYTES

# Fragments from this size on are taken away. Smaller ones are the library's best fit only for small
# tensors, of which all together take little memory.
LEAST_FRAGMENT_BYTES = 64 * KIB
LARGEST_FRAGMENT_BYTES = 256 * MIB
# Tensors of these sizes and more are mappings of their own: in all calls (the largest threshold of
# malloc/malloc.c, which the library comes to once such a tensor is freed), and in first calls.
MAPPED_BYTES, FIRST_MAPPED_BYTES = 32 * MIB, 8 * MIB
# The library's cache: its largest chunks, the step between sizes, and how many of each it keeps.
LARGEST_CACHED, CHUNK_STEP, MOST_CACHED = 1032, 16, 7
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # malloc.h


def trim_freed_memory() -> None:
    """Return the freed memory of the C library's heaps to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class HeapFragments:
    """Takes the free ranges between allocations of the heap, so that tensors lie side by side.

    The C library puts a tensor into the smallest free range that is large enough. Objects that stay
    (weights of modules, code that kernels generate) part the free memory into many ranges, and
    tensors of different sizes then write to all of them, one after the other: a UNet whose tensors
    take 180 MiB at once wrote to 560 MiB. Taken ranges are not written to, so they take no memory,
    and new tensors lie at the end of the heap, as in a new process.

    In a component's first call, objects that stay come between the new tensors too: 16,000 in
    SDXL's UNet, most of them of kernels that oneDNN generates. So tensors of `FIRST_MAPPED_BYTES`
    and more are mappings then: on a Xeon with AMX, its activations took 230 in place of 370 MB.

    Only the heap of the main thread is one range; in other threads nothing is taken.
    """

    def __init__(self) -> None:
        self._library = _c_library()
        self._addresses = list[int]()
        self._has_huge_pages = tensors_get_huge_pages()
        self._has_taken = False

    def take(self, *, first: bool) -> None:
        """Return freed memory to the system, and take the free ranges.

        ``first``: before the first call of a component. Where tensors had huge pages, a range's
        header would get one too: they get small pages.
        """
        trim_freed_memory()
        library = self._library
        if library is None or not self._in_main_heap():
            return
        self._has_taken = True
        self._map_from(FIRST_MAPPED_BYTES if first else MAPPED_BYTES)
        self._fill_cache()
        if self._has_huge_pages:  # PyTorch asks again for new tensors
            self._advise(mmap.MADV_NOHUGEPAGE)
        end: int = library.sbrk(0)
        for nbytes in _sizes():
            while address := library.malloc(nbytes):
                if address + nbytes > end:  # no free range, but at the heap's end, or a mapping
                    library.free(address)
                    break
                self._addresses.append(address)
        trim_freed_memory()

    def release(self) -> None:
        """Free the ranges. Where all memory has huge pages, the heap has them again."""
        if not self._has_taken:
            return
        self._has_taken = False
        self._map_from(MAPPED_BYTES)
        if self._addresses and huge_pages_mode() == "always":
            self._advise(mmap.MADV_HUGEPAGE)
        while self._addresses:
            assert self._library is not None
            self._library.free(self._addresses.pop())

    def _map_from(self, nbytes: int) -> None:
        """Let allocations of ``nbytes`` and more be mappings (mallopt(3))."""
        library = self._library
        assert library is not None
        library.mallopt(M_MMAP_THRESHOLD, nbytes)
        library.mallopt(M_TRIM_THRESHOLD, 2 * MAPPED_BYTES)

    def _fill_cache(self) -> None:
        """Fill the library's cache of small chunks, so that it keeps none next to tensors.

        Chunks in it part free ranges; others are merged (tcache in malloc/malloc.c, which keeps
        `MOST_CACHED` chunks of each size up to `LARGEST_CACHED`).
        """
        library = self._library
        assert library is not None
        for nbytes in range(LARGEST_CACHED, 0, -CHUNK_STEP):
            for address in [library.malloc(nbytes) for _ in range(MOST_CACHED)]:
                library.free(address)

    def _advise(self, advice: int) -> None:
        """Call madvise(2) for the whole heap."""
        library, begin = self._library, _heap_begin()
        assert library is not None
        if begin is not None:
            nbytes = int(library.sbrk(0)) - begin
            library.madvise(begin, nbytes // PAGE_BYTES * PAGE_BYTES, advice)

    def _in_main_heap(self) -> bool:
        """Return whether this thread's memory is in the heap that ends at the program break."""
        library = self._library
        assert library is not None
        address: int = library.malloc(LEAST_FRAGMENT_BYTES)
        library.free(address)
        return address < int(library.sbrk(0))  # mappings are above it


def _sizes() -> Iterator[int]:
    """Yield sizes of ranges, descending."""
    nbytes = LARGEST_FRAGMENT_BYTES
    while nbytes >= LEAST_FRAGMENT_BYTES:
        yield nbytes
        nbytes = nbytes * 3 // 4


@functools.cache
def _heap_begin() -> int | None:
    """Return where the heap begins, a page (proc_pid_maps(5)); None if unknown."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    begins = [int(line.partition("-")[0], 16) for line in lines if line.endswith("[heap]")]
    return min(begins, default=None)


def _c_library() -> ctypes.CDLL | None:
    """Return glibc; None if this process uses another C library."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.sbrk.argtypes, library.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library
