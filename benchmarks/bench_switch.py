"""What a block switch costs: bandwidth of a swap, and how much of it hides behind compute.

    python benchmarks/bench_switch.py                 within the host, by threads, against memcpy
    python benchmarks/bench_switch.py --device cuda   on streams, against one-way copies of pinned memory; pinning both ways
    python benchmarks/bench_switch.py --reserve       Llama-3-8B's idle slots: asked, reserved, and resident once written

A swap sends one block's slots out while the other's come in. Its bandwidth counts the bytes of both directions. The yardstick
copies as many bytes in the same two directions with nothing to keep in order. Contenders take turns and the least of their
times counts. "Hidden" is the share of a lone swap's time by which compute with a swap beside it does not get longer.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from badam_kernels import _C
from badam_kernels.blocks import Span
from badam_kernels.room import Rooms
from badam_kernels.store import Store

LAYER = 218_112_000  # parameters of one of Llama-3-8B's 32 layers
CHUNK_BYTES = 16 << 20


class HostRooms(Rooms):
    """A room on the CPU, filled by threads; the caller is what computes."""

    def _stream(self) -> int:
        return 0


def best(contenders: dict[Any, Callable[[], object]], rounds: int, before: Callable = lambda: None) -> dict[Any, float]:
    """Seconds of the fastest of `rounds` runs of each; they take turns, each after an untimed call of `before`."""
    least = dict.fromkeys(contenders, math.inf)
    for _ in range(rounds):
        for name, run in contenders.items():
            before()
            start = time.perf_counter()
            run()
            least[name] = min(least[name], time.perf_counter() - start)
    return least


class HostSwap:
    """Two blocks of `block_bytes` that take turns in a room of host memory."""

    def __init__(self, block_bytes: int):
        self.slabs = [_C.Slab(block_bytes), _C.Slab(block_bytes)]
        self.blocks = []
        for i, slab in enumerate(self.slabs):
            host = torch.frombuffer(slab, dtype=torch.uint8).fill_(1)
            self.blocks.append({Span(f"p{i}", 0, block_bytes): {"w": host}})
        self.room = HostRooms(torch.device("cpu"), _C.Stager(None, CHUNK_BYTES, True), self.slabs)
        self.now = 0
        self.room.fetch(self.blocks[0])

    def start(self) -> None:
        self.room.flush(list(self.blocks[self.now]))
        self.now = 1 - self.now
        self.room.prefetch(self.blocks[self.now])

    def finish(self) -> None:
        self.room.fetch(self.blocks[self.now])
        self.room.stager.settle()

    def swap(self) -> None:
        self.start()
        self.finish()


def memcpy_both_ways(block_bytes: int) -> Callable[[], object]:
    """Plain memcpy of a block out of a buffer and of another into another, on two threads."""
    memcpy = ctypes.CDLL(None).memcpy  # ctypes gives up the GIL
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    buffers = [torch.ones(block_bytes, dtype=torch.uint8) for _ in range(4)]
    pool = ThreadPoolExecutor(2)

    def run() -> None:
        list(pool.map(lambda i: memcpy(buffers[2 * i].data_ptr(), buffers[2 * i + 1].data_ptr(), block_bytes), range(2)))

    return run


def matrix_products(seconds: float) -> Callable[[], None]:
    """Compute of about `seconds` on the host that hardly uses memory bandwidth."""
    a = torch.randn(512, 512)
    once = best({"": lambda: a @ a}, 20)[""]
    count = math.ceil(seconds / once)

    def run() -> None:
        for _ in range(count):
            torch.mm(a, a)

    return run


def on_the_host(block_bytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    swap = HostSwap(block_bytes)
    moved = 2 * block_bytes
    times = best({"memcpy": memcpy_both_ways(block_bytes), "swap": swap.swap}, rounds)
    compute = matrix_products(2 * times["swap"])

    alone, beside, waited = [], [], []

    def computing(spent: list[float]) -> None:
        start = time.thread_time()
        compute()
        spent.append(time.thread_time() - start)

    def both() -> None:
        swap.start()
        computing(beside)
        start = time.perf_counter()
        swap.finish()
        waited.append(time.perf_counter() - start)

    hidden = best({"compute": lambda: computing(alone), "swap": swap.swap, "both": both}, rounds)
    by_clock = hidden["both"] - hidden["compute"]
    by_processor = min(beside) - min(alone) + min(waited)
    print(f"{block_bytes / 1e6:.0f} MB out and in, {rounds} rounds, {os.cpu_count()} cores, two threads copy, one computes")
    print(f"memcpy           {moved / times['memcpy'] / 1e9:7.2f} GB/s")
    print(f"swap             {moved / times['swap'] / 1e9:7.2f} GB/s   {100 * times['memcpy'] / times['swap']:5.1f} % of memcpy")
    print(f"compute          {1e3 * hidden['compute']:7.1f} ms     with a swap beside it {1e3 * hidden['both']:.1f} ms")
    print(f"a lone swap      {1e3 * hidden['swap']:7.1f} ms")
    print(f"hidden           {100 * (1 - by_clock / hidden['swap']):7.1f} % by the clock")
    print(f"                 {100 * (1 - by_processor / hidden['swap']):7.1f} % by compute's processor time and its wait in the end")


# --- on a GPU -----------------------------------------------------------------------------------------------------------


def synchronized(run: Callable[[], object]) -> Callable[[], None]:
    def timed() -> None:
        run()
        torch.cuda.synchronize()

    return timed


class DeviceSwap:
    """Blocks of `block_bytes` that take turns on `device`; `depth` of them are brought ahead of their turn."""

    def __init__(self, block_bytes: int, device: torch.device, depth: int = 0):
        self.device, self.depth = device, depth
        self.spans = [Span(f"p{i}", 0, block_bytes) for i in range(2 + depth)]
        self.store = Store({span: {"w": torch.uint8} for span in self.spans}, [device], depth)
        self.now = 0
        self.fetch()

    def start(self) -> None:
        self.store.flush([self.spans[self.now]])
        self.now += 1
        for turn in range(self.now, self.now + 1 + self.depth):
            self.store.prefetch([self.spans[turn % len(self.spans)]], self.device)
        self.now %= len(self.spans)

    def fetch(self) -> torch.Tensor:
        span = self.spans[self.now]
        return self.store.fetch([span], self.device)[span]["w"]

    def swap(self) -> None:
        self.start()
        self.fetch()
        self.store.read(self.spans[self.now - 1])


def on_the_device(block_bytes: int, rounds: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    swap = DeviceSwap(block_bytes, device)
    host, other = swap.store.read(swap.spans[1])["w"], torch.empty_like(swap.fetch())
    print(f"pinned: {host.is_pinned()}; {block_bytes / 1e6:.0f} MB out and in, {rounds} rounds, {torch.cuda.get_device_name()}")
    ways = {"to device": lambda: other.copy_(host, non_blocking=True), "to host": lambda: host.copy_(other, non_blocking=True)}
    times = best({**{name: synchronized(way) for name, way in ways.items()}, "swap": synchronized(swap.swap)}, rounds)
    one_way = max(block_bytes / times[name] for name in ways)
    both_ways = 2 * block_bytes / times["swap"]
    for name in ways:
        print(f"{name:16} {block_bytes / times[name] / 1e9:7.2f} GB/s")
    print(f"swap             {both_ways / 1e9:7.2f} GB/s   {100 * both_ways / one_way:5.1f} % of one way")
    swap.store.close()
    exposed_time(block_bytes, device, rounds)
    pinning(device, 8 * block_bytes)


def exposed_time(block_bytes: int, device: torch.device, rounds: int) -> None:
    """How much longer K steps get by the switch before them. A step is about 50 ms of matrix products."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    once = best({"": synchronized(lambda: torch.mm(a, a))}, 10)[""]
    products = math.ceil(0.05 / once)
    swaps = {depth: DeviceSwap(block_bytes, device, depth) for depth in (0, 1)}

    def visits(count: int, steps: int, swap: DeviceSwap | None) -> Callable[[], None]:
        def run() -> None:
            for step in range(count * steps):
                if swap and step % steps == 0:
                    swap.start()
                for _ in range(products):
                    torch.mm(a, a)
                if swap and step % steps == 0:
                    swap.fetch()
            torch.cuda.current_stream(device).synchronize()  # what is still on its way for later visits is theirs

        return run

    for k in (1, 10, 100):
        count = max(1, 10 // k)
        runs = {"plain": visits(count, k, None)} | {depth: visits(count, k, swap) for depth, swap in swaps.items()}
        times = best(runs, max(2, rounds // k), torch.cuda.synchronize)
        for depth in swaps:
            exposed = (times[depth] - times["plain"]) / count
            share = 100 * exposed * count / times["plain"]
            print(f"K = {k:3}, depth {depth} {1e3 * exposed:7.3f} ms exposed, {share:.2f} % of {k} steps")
    for swap in swaps.values():
        swap.store.close()


def pinning(device: torch.device, total: int) -> None:
    """Pinned memory by the driver's own allocation, and by registering pages: time to get it, and its bandwidth."""
    context = _C.Context(device.index)
    for name, registered in (("allocated", False), ("registered", True)):
        start = time.perf_counter()
        slab = _C.Slab(total, context, registered=registered)
        seconds = time.perf_counter() - start
        host = torch.frombuffer(slab, dtype=torch.uint8)
        there = torch.empty(total, dtype=torch.uint8, device=device)
        times = best(
            {
                "in": synchronized(lambda: there.copy_(host, non_blocking=True)),
                "out": synchronized(lambda: host.copy_(there, non_blocking=True)),
            },
            5,
        )
        speeds = ", ".join(f"{total / times[way] / 1e9:.2f} {way}" for way in times)
        print(f"{name:16} {total / seconds / 1e9:7.2f} GB/s to get, {speeds}")


# --- the size ----------------------------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def reserve() -> None:
    layout = {Span(f"layers.{i}", 0, LAYER): {"w": torch.int16} for i in range(32)}
    before = resident()
    store = Store(layout)
    sizes = store.reservation()
    print(f"exact {sizes['asked']:,} bytes, reserved {sizes['reserved']:,} (+{sizes['reserved'] - sizes['asked']:,})")
    print(f"untouched: resident {resident() - before:,}")
    for span in layout:
        store.read(span)["w"].fill_(1)
    grown, touched = resident() - before, store.reservation()["touched"]
    print(f"written:   resident {grown:,} ({100 * (grown / sizes['asked'] - 1):+.3f} %), touched {touched:,}")
    store.close()
    print(f"closed:    resident {resident() - before:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--bytes", type=int, default=2 * LAYER, help="of one block's slots (default: SPLIT, a Llama-3-8B layer)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--reserve", action="store_true", help="reserve and write 14 GB instead")
    given = parser.parse_args()
    if given.reserve:
        reserve()
    elif given.device == "cuda":
        on_the_device(given.bytes, given.rounds)
    else:
        on_the_host(given.bytes, given.rounds)


if __name__ == "__main__":
    main()
