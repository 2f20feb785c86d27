"""Caches that keep slots in queues: LRU, without and with a held part, ARC, S3-FIFO and W-TinyLFU.

They are as published, but for the experts of the running layer, which stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Iterable
from itertools import chain

Queue = OrderedDict[int, None]  # oldest first

_HOLD_TOKENS = 8  # between two choices of what is held
_HOLD_HALF_LIFE = 32  # tokens, of the counts it is chosen by
_MAX_COUNT = 3  # of S3-FIFO: two bits
_SMALL_SHARE = 10  # S3-FIFO's first queue holds 1/10
_WINDOW_SHARE = 100  # W-TinyLFU's window holds 1/100
_PROBATION_SHARE = 5  # and of the rest 1/5 is on probation
_SAMPLE = 10  # W-TinyLFU halves its counts after this many accesses per slot


class QueueCache(ABC):
    """A cache of `capacity` slots; an access is a hit, or it brings the slot in and one other out."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def serve(self, token: int, layer: int, slots: list[int]) -> int:
        """Bring in the slots, at most `capacity`, that a layer needs at the same time; return how many were missing."""
        pinned = set(slots)
        missing = [slot for slot in slots if slot not in self]
        for slot in slots:
            self.access(slot, pinned)
        return len(missing)

    @abstractmethod
    def __contains__(self, slot: int) -> bool: ...

    @abstractmethod
    def access(self, slot: int, pinned: Container[int]) -> None:
        """Use one slot; no pinned one may leave."""


def _first_free(queue: Iterable[int], pinned: Container[int]) -> int | None:
    return next((slot for slot in queue if slot not in pinned), None)


class Lru(QueueCache):
    """The least recently used slot goes."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: Queue = OrderedDict()

    def __contains__(self, slot: int) -> bool:
        return slot in self.queue

    def access(self, slot: int, pinned: Container[int]) -> None:
        self.queue[slot] = None
        self.queue.move_to_end(slot)
        if len(self.queue) > self.capacity:
            del self.queue[next(s for s in self.queue if s not in pinned)]


class HeldLru(Lru):
    """LRU, except that the most used of its slots, `share` of the capacity, are held: the page cache with locked pages.

    They are chosen anew every few tokens, by decayed counts and among resident slots, so that nothing is read for it.
    What is not held any more leaves by its last use, as any other.
    """

    def __init__(self, capacity: int, share: float) -> None:
        super().__init__(capacity)
        self.room = int(capacity * share)
        self.held: set[int] = set()
        self.counts: defaultdict[int, float] = defaultdict(float)

    def serve(self, token: int, layer: int, slots: list[int]) -> int:
        if layer == 0 and token % _HOLD_TOKENS == 0:
            for slot in self.counts:
                self.counts[slot] *= 0.5 ** (_HOLD_TOKENS / _HOLD_HALF_LIFE)
            self.held = set(sorted(self.queue, key=lambda slot: -self.counts[slot])[: self.room])
        for slot in slots:
            self.counts[slot] += 1
        return super().serve(token, layer, slots)

    def access(self, slot: int, pinned: Container[int]) -> None:
        self.queue[slot] = None
        self.queue.move_to_end(slot)
        if len(self.queue) > self.capacity:
            # a held one only where the rest is what the layer needs
            order = chain((s for s in self.queue if s not in self.held), self.queue)
            del self.queue[next(s for s in order if s not in pinned)]


class Arc(QueueCache):
    """Megiddo and Modha, FAST 2003: a queue of slots used once and one of slots used again, sized by their ghosts."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.once: Queue = OrderedDict()
        self.again: Queue = OrderedDict()
        self.once_ghosts: Queue = OrderedDict()
        self.again_ghosts: Queue = OrderedDict()
        self.target = 0.0  # wanted length of `once`

    def __contains__(self, slot: int) -> bool:
        return slot in self.once or slot in self.again

    def access(self, slot: int, pinned: Container[int]) -> None:
        if slot in self:
            self.once.pop(slot, None)
            self.again[slot] = None
            self.again.move_to_end(slot)
            return
        ghosts, others = len(self.once_ghosts), len(self.again_ghosts)
        if slot in self.once_ghosts:
            self.target = min(self.capacity, self.target + max(1.0, others / ghosts))
            self._make_room(pinned, from_again=False)
            del self.once_ghosts[slot]
            self.again[slot] = None
        elif slot in self.again_ghosts:
            self.target = max(0.0, self.target - max(1.0, ghosts / others))
            self._make_room(pinned, from_again=True)
            del self.again_ghosts[slot]
            self.again[slot] = None
        else:
            self._make_room(pinned, from_again=False)
            self.once[slot] = None
            while len(self.once) + len(self.once_ghosts) > self.capacity and self.once_ghosts:
                self.once_ghosts.popitem(last=False)
            while len(self.once_ghosts) + len(self.again_ghosts) > self.capacity:
                self.again_ghosts.popitem(last=False)

    def _make_room(self, pinned: Container[int], *, from_again: bool) -> None:
        if len(self.once) + len(self.again) < self.capacity:
            return
        once, again = _first_free(self.once, pinned), _first_free(self.again, pinned)
        too_long = len(self.once) > self.target or (from_again and len(self.once) == self.target)
        if once is not None and (too_long or again is None):
            del self.once[once]
            self.once_ghosts[once] = None
        elif again is not None:
            del self.again[again]
            self.again_ghosts[again] = None


class S3Fifo(QueueCache):
    """Yang et al., SOSP 2023: a small first-in first-out queue, a main one, and a ghost queue that lets into it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: deque[int] = deque()
        self.main: deque[int] = deque()
        self.ghosts: Queue = OrderedDict()
        self.count: dict[int, int] = {}  # of the resident ones

    def __contains__(self, slot: int) -> bool:
        return slot in self.count

    def access(self, slot: int, pinned: Container[int]) -> None:
        if slot in self.count:
            self.count[slot] = min(self.count[slot] + 1, _MAX_COUNT)
            return
        while len(self.count) >= self.capacity:
            if len(self.small) >= max(1, self.capacity // _SMALL_SHARE) and any(s not in pinned for s in self.small):
                self._leave_small(pinned)
            elif any(s not in pinned for s in self.main):
                self._leave_main(pinned)
            else:
                self._leave_small(pinned)
        (self.main if slot in self.ghosts else self.small).append(slot)
        self.ghosts.pop(slot, None)
        self.count[slot] = 0

    def _leave_small(self, pinned: Container[int]) -> None:
        """Move the oldest to the main queue if it was used again, else out."""
        slot = next(s for s in self.small if s not in pinned)
        self.small.remove(slot)
        if self.count[slot] > 1:
            self.count[slot] = 0
            self.main.append(slot)
            return
        del self.count[slot]
        self.ghosts[slot] = None
        while len(self.ghosts) > self.capacity - self.capacity // _SMALL_SHARE:
            self.ghosts.popitem(last=False)

    def _leave_main(self, pinned: Container[int]) -> None:
        """Put the oldest out, or at the end with one use less."""
        slot = next(s for s in self.main if s not in pinned)
        self.main.remove(slot)
        if self.count[slot]:
            self.count[slot] -= 1
            self.main.append(slot)
        else:
            del self.count[slot]


class WTinyLfu(QueueCache):
    """Einziger et al., ACM TOS 2017: a small LRU window, and a segmented LRU that only the more frequent enter.

    Counts are exact where the paper has a sketch.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.window: Queue = OrderedDict()
        self.probation: Queue = OrderedDict()
        self.protected: Queue = OrderedDict()
        self.counts: Counter[int] = Counter()
        self.n_accesses = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self.window or slot in self.probation or slot in self.protected

    def access(self, slot: int, pinned: Container[int]) -> None:
        self._count(slot)
        window = max(1, self.capacity // _WINDOW_SHARE)
        main = self.capacity - window
        if slot in self.probation:
            del self.probation[slot]
            self.protected[slot] = None
            if len(self.protected) > main - main // _PROBATION_SHARE:
                self.probation[self.protected.popitem(last=False)[0]] = None
            return
        for queue in (self.window, self.protected):
            if slot in queue:
                queue.move_to_end(slot)
                return
        self.window[slot] = None
        if len(self.window) > window:
            self._leave_window(main, pinned)

    def _leave_window(self, main: int, pinned: Container[int]) -> None:
        """The oldest of the window enters the main part, or leaves if what it would replace is more frequent."""
        candidate = _first_free(self.window, pinned)
        victim = None
        if len(self.probation) + len(self.protected) >= main:
            victim = _first_free((*self.probation, *self.protected), pinned)
            if candidate is not None and (victim is None or self.counts[candidate] <= self.counts[victim]):
                del self.window[candidate]
                return
        if candidate is None:  # the window holds nothing but what this layer needs
            candidate = next(iter(self.window))
        if victim is not None:
            self.probation.pop(victim, None)
            self.protected.pop(victim, None)
        del self.window[candidate]
        self.probation[candidate] = None

    def _count(self, slot: int) -> None:
        self.counts[slot] += 1
        self.n_accesses += 1
        if self.n_accesses >= _SAMPLE * self.capacity:
            self.n_accesses //= 2
            self.counts = Counter({s: n // 2 for s, n in self.counts.items() if n > 1})
