"""A second model of PyTorch's caching allocator, written from the rules of its C++
(c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13).

Blocks are linked, and lists of them are sorted, as in the C++. `graphrun.model.allocator` keeps
ranges by offset instead; the two share no code.

    Pool.free            mapped blocks without a tensor, by size, then address: `get_free_block`
    Pool.unmapped        blocks without memory, by address: `find_expandable_block`
    Block.previous, next  neighbours in a segment, merged if both are free, and both mapped or not

One stream of one device; no limit on the split size; no rounding to powers of two. A later segment
has a higher address. On a card the driver chooses addresses.
"""

from __future__ import annotations

from bisect import bisect_left, insort

KIB, MIB = 1 << 10, 1 << 20
LEAST = 512  # kMinBlockSize
ADDRESS_SPACE = 1 << 60  # between the beginnings of two segments


class Block:
    """A piece of a segment."""

    def __init__(self, address: int, size: int, is_mapped: bool) -> None:
        self.address, self.size, self.is_mapped = address, size, is_mapped
        self.is_used = False
        self.previous: Block | None = None
        self.next: Block | None = None


def by_size(block: Block) -> tuple[int, int]:
    return block.size, block.address


def by_address(block: Block) -> int:
    return block.address


class Pool:
    """Blocks of one size class. ``page_bytes``, ``space_bytes``: of its expandable segments; 0 for
    native ones."""

    def __init__(self, small: bool, page_bytes: int, space_bytes: int) -> None:
        self.small, self.page_bytes = small, page_bytes
        self.pages = -(-space_bytes // page_bytes) if page_bytes else 0
        self.free: list[Block] = []
        self.unmapped: list[Block] = []
        self.reserved_bytes = 0
        self.segments = 0

    # -- sorted lists

    def add(self, block: Block) -> None:
        if block.is_mapped:
            insort(self.free, block, key=by_size)
        else:
            insort(self.unmapped, block, key=by_address)

    def remove(self, block: Block) -> None:
        if block.is_mapped:
            del self.free[bisect_left(self.free, by_size(block), key=by_size)]
        else:
            del self.unmapped[bisect_left(self.unmapped, block.address, key=by_address)]

    def cut(self, block: Block, size: int) -> Block:
        """Shortens ``block`` to ``size``, and returns the rest of it as a new block behind it."""
        rest = Block(block.address + size, block.size - size, block.is_mapped)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def merge(self, block: Block) -> None:
        """Extends ``block``, which is in no list, over free neighbours that are mapped, or
        unmapped, as it is."""
        if (other := block.previous) and not other.is_used and other.is_mapped == block.is_mapped:
            self.remove(other)
            block.address, block.previous = other.address, other.previous
            block.size += other.size
            if block.previous is not None:
                block.previous.next = block
        if (other := block.next) and not other.is_used and other.is_mapped == block.is_mapped:
            self.remove(other)
            block.size, block.next = block.size + other.size, other.next
            if block.next is not None:
                block.next.previous = block

    # -- what the allocator does

    def take(self, size: int) -> Block:
        new = self.expanded if self.page_bytes else self.native_segment
        block = self.best_fit(size) or new(size)
        rest = block.size - size
        if rest >= LEAST if self.small or self.page_bytes else rest > MIB:
            self.add(self.cut(block, size))
        block.is_used = True
        return block

    def give(self, block: Block) -> None:
        block.is_used = False
        self.merge(block)
        self.add(block)

    def best_fit(self, size: int) -> Block | None:
        """The smallest free block, replaced by the next larger one as long as that has less room,
        counted with the unmapped block behind each."""
        number = bisect_left(self.free, (size, 0), key=by_size)
        if number == len(self.free):
            return None
        if self.page_bytes:
            larger = iter(self.free[number + 1 :])
            while (other := next(larger, None)) and room(other) < room(self.free[number]):
                number += 1
        block = self.free[number]
        self.remove(block)
        return block

    def native_segment(self, size: int) -> Block:
        self.reserved_bytes += native_bytes(size)
        self.segments += 1
        return Block(self.segments * ADDRESS_SPACE, native_bytes(size), True)

    def expanded(self, size: int) -> Block:
        """Maps pages at the lowest address where free blocks in a row, one of them unmapped,
        fit."""
        block = self.first_with_room(size)
        if not block.is_mapped:
            self.map(block, min(block.size, size))
        while block.size < size:
            assert block.next is not None
            unmapped = block.next
            self.map(unmapped, min(size - block.size, unmapped.size))
            block = unmapped  # merged with the block before it
        self.remove(block)
        return block

    def first_with_room(self, size: int) -> Block:
        for unmapped in self.unmapped:
            previous = unmapped.previous
            first = unmapped if previous is None or previous.is_used else previous
            room_bytes, block = 0, first
            while block is not None and not block.is_used and room_bytes < size:
                room_bytes, block = room_bytes + block.size, block.next  # type: ignore[assignment]
            if room_bytes >= size:
                return first
        self.segments += 1
        segment = Block(self.segments * ADDRESS_SPACE, self.pages * self.page_bytes, False)
        self.add(segment)
        return segment

    def map(self, block: Block, size: int) -> None:
        """Backs the first ``size`` bytes of an unmapped block with memory, in whole pages."""
        assert (block.address % ADDRESS_SPACE) % self.page_bytes == 0
        size = -(-size // self.page_bytes) * self.page_bytes
        self.remove(block)
        if size < block.size:
            self.add(self.cut(block, size))
        block.is_mapped = True
        self.merge(block)
        self.add(block)
        self.reserved_bytes += size

    def trim(self) -> None:
        """Releases native segments without a tensor, and unmaps pages that lie within free
        blocks."""
        for block in list(self.free):
            if self.page_bytes:
                self.unmap(block)
            elif block.previous is None and block.next is None:
                self.remove(block)
                self.reserved_bytes -= block.size

    def unmap(self, block: Block) -> None:
        base = block.address // ADDRESS_SPACE * ADDRESS_SPACE
        first = base - (base - block.address) // self.page_bytes * self.page_bytes
        last = base + (block.address + block.size - base) // self.page_bytes * self.page_bytes
        if first >= last:
            return
        self.remove(block)
        if last < block.address + block.size:
            self.add(self.cut(block, last - block.address))
        if block.address < first:
            head, block = block, self.cut(block, first - block.address)
            self.add(head)
        self.reserved_bytes -= block.size
        block.is_mapped = False
        self.merge(block)
        if block.previous is not None or block.next is not None:
            self.add(block)  # else the segment is released as a whole


def room(block: Block) -> int:
    return block.size + (block.next.size if block.next and not block.next.is_mapped else 0)


def native_bytes(size: int) -> int:
    """Of a native segment: 2 MiB, 20 MiB, or the size in steps of 2 MiB."""
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


class Refused(Exception):
    """The allocator would exceed its limit, before it trims."""


class LinkedBlocks:
    """The allocator. Pages and the largest small size are PyTorch's, times ``page_scale``.

    ``limit_bytes``: as of `set_per_process_memory_fraction`. Where memory is needed, it is compared
    with the reserved bytes and those of a native segment, whatever is mapped (`alloc_block`).
    ``card_bytes``: an expandable segment has 9/8 of them as its address space.
    """

    def __init__(
        self,
        expandable: bool,
        page_scale: float = 1.0,
        limit_bytes: int = ADDRESS_SPACE,
        card_bytes: int = 1 << 50,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.small_bytes = whole(int(MIB * page_scale))
        small_page, large_page = (whole(int(mib * MIB * page_scale)) for mib in (2, 20))
        space = card_bytes + card_bytes // 8
        self.small = Pool(True, small_page if expandable else 0, space)
        self.large = Pool(False, large_page if expandable else 0, space)
        self.live: dict[int, tuple[Pool, Block]] = {}

    @property
    def used_bytes(self) -> int:
        return self.small.reserved_bytes + self.large.reserved_bytes

    def allocate(self, key: int, nbytes: int) -> None:
        previous_bytes, size = self.used_bytes, whole(nbytes)
        pool = self.small if size <= self.small_bytes else self.large
        self.live[key] = pool, pool.take(size)
        if (
            self.used_bytes > previous_bytes
            and previous_bytes + native_bytes(size) > self.limit_bytes
        ):
            raise Refused(nbytes)

    def release(self, key: int) -> None:
        pool, block = self.live.pop(key)
        pool.give(block)

    def trim(self) -> None:
        self.large.trim()
        self.small.trim()

    def place(self, key: int) -> tuple[int, int, int]:
        """Number of the segment in its pool, offset in it, bytes of the block."""
        block = self.live[key][1]
        segment, offset = divmod(block.address, ADDRESS_SPACE)
        return segment - 1, offset, block.size


def whole(nbytes: int) -> int:
    return max(LEAST, -(-nbytes // LEAST) * LEAST)
