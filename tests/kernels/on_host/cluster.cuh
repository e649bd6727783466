// The words of compute/kernels/cluster.cuh, and CUDA's own, for a host: one cluster of thread blocks, each thread a
// coroutine that others replace where it waits for them. Shared memory is a block's own heap memory, so that the
// compiler's sanitizers see what runs past its end; the order in which threads get their turn is drawn from a seed.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#define __device__ inline
#define __global__
#define __launch_bounds__(...)
#define APART
#define SHARED_MEMORY(TYPE, name) TYPE &name = *(TYPE *)host::own_shared(sizeof(TYPE))
#define threadIdx (host::self->thread_index)
#define blockIdx (host::self->block_index)

using std::max;
using std::min;

struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
inline float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }

struct Arrival { int phase, pending, bytes; };

namespace host {

constexpr int STACK = 1 << 17;
struct Index { unsigned x, y; };

struct Warp { int arrived = 0, generation = 0; int values[2][32]; };
struct Block {
    char *shared = nullptr;
    size_t bytes = 0;
    int arrived = 0, generation = 0, running = 0;
    std::vector<Warp> warps;
};
struct Thread {
    ucontext_t context;
    Index thread_index, block_index;
    Block *block;
    int cluster_generation = 0;
    bool done = false;
};

inline Thread *self;
inline ucontext_t scheduler;
inline std::vector<Block> blocks;
inline int cluster_arrived = 0, cluster_generation = 0;
inline std::function<void()> kernel;

[[noreturn]] inline void fail(const char *what) {
    fprintf(stderr, "block %u, thread %u: %s\n", self->block_index.x, self->thread_index.x, what);
    abort();
}
inline void yield() { swapcontext(&self->context, &scheduler); }
inline void *own_shared(size_t bytes) {
    Block &block = *self->block;
    if (!block.shared) {
        block.shared = (char *)aligned_alloc(16, (bytes + 15) / 16 * 16);
        memset(block.shared, 0xa5, bytes);
        block.bytes = bytes;
    }
    return block.shared;
}
template <typename Type> Type *in_block(const Type *own, unsigned rank) {
    Block &block = blocks.at(rank);
    size_t offset = (const char *)own - self->block->shared;
    if (!block.shared || !block.running) fail("another block's shared memory, which is not there");
    if (offset + sizeof(Type) > block.bytes) fail("outside another block's shared memory");
    return (Type *)(block.shared + offset);
}
// Waits for all lanes of the warp; returns what each of them brought.
inline const int *of_warp(int value) {
    Warp &warp = self->block->warps[self->thread_index.x / 32];
    int generation = warp.generation;
    int *values = warp.values[generation & 1];
    values[self->thread_index.x % 32] = value;
    if (++warp.arrived == 32) warp.arrived = 0, ++warp.generation;
    while (warp.generation == generation) yield();
    return values;
}
inline void arrived(Arrival *at) {
    if (at->pending == 0 && at->bytes == 0) at->phase ^= 1, at->pending = 1;
}
inline void start() {
    kernel();
    self->done = true;
    --self->block->running;
    swapcontext(&self->context, &scheduler);
}
// Runs one cluster; returns when all its threads have.
inline void run(unsigned cluster, unsigned threads, unsigned row, unsigned seed, std::function<void()> body) {
    kernel = body;
    blocks.assign(cluster, Block());
    cluster_arrived = cluster_generation = 0;
    std::vector<Thread> all(cluster * threads);
    char *stacks = (char *)mmap(nullptr, all.size() * STACK, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (size_t i = 0; i < all.size(); ++i) {
        Thread &thread = all[i];
        thread.block = &blocks[i / threads];
        thread.block->running = threads;
        thread.block->warps.resize(threads / 32);
        thread.thread_index = {unsigned(i % threads), 0};
        thread.block_index = {unsigned(i / threads), row};
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks + i * STACK;
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, start, 0);
    }
    std::vector<Thread *> turns;
    for (Thread &thread : all) turns.push_back(&thread);
    std::mt19937 random(seed);
    while (!turns.empty()) {
        if (seed) std::shuffle(turns.begin(), turns.end(), random);
        for (Thread *thread : turns) {
            self = thread;
            swapcontext(&scheduler, &thread->context);
        }
        turns.erase(std::remove_if(turns.begin(), turns.end(), [](Thread *thread) { return thread->done; }), turns.end());
    }
    for (Block &block : blocks) free(block.shared);
    munmap(stacks, all.size() * STACK);
}

}  // namespace host

inline void __syncthreads() {
    host::Block &block = *host::self->block;
    int generation = block.generation;
    if (++block.arrived == (int)block.warps.size() * 32) block.arrived = 0, ++block.generation;
    while (block.generation == generation) host::yield();
}
inline int __shfl_up_sync(unsigned, int value, int distance) {
    int lane = threadIdx.x % 32;
    return host::of_warp(value)[lane >= distance ? lane - distance : lane];
}
inline int __reduce_add_sync(unsigned, int value) {
    const int *values = host::of_warp(value);
    unsigned sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += values[lane];
    return sum;
}
inline int __reduce_max_sync(unsigned, int value) {
    const int *values = host::of_warp(value);
    return *std::max_element(values, values + 32);
}
inline unsigned __ballot_sync(unsigned, bool flag) {
    const int *values = host::of_warp(flag);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) ballot |= (unsigned)values[lane] << lane;
    return ballot;
}
inline bool __any_sync(unsigned all, bool flag) { return __ballot_sync(all, flag) != 0; }
inline int atomicAdd(int *at, int value) { int before = *at; *at += value; return before; }

inline void await_kernel_before() {}
inline void cluster_arrive() {
    host::self->cluster_generation = host::cluster_generation;
    int threads = 0;
    for (host::Block &block : host::blocks) threads += block.warps.size() * 32;
    if (++host::cluster_arrived == threads) host::cluster_arrived = 0, ++host::cluster_generation;
}
inline void cluster_arrive_relaxed() { cluster_arrive(); }
inline void cluster_wait() {
    while (host::cluster_generation == host::self->cluster_generation) host::yield();
}
inline void cluster_barrier() { cluster_arrive(), cluster_wait(); }
inline void store_remote(int2 *own, unsigned rank, int2 value) { *host::in_block(own, rank) = value; }
inline void add_remote(int *own, unsigned rank, int value) { *host::in_block(own, rank) += value; }
inline void init_arrival(Arrival *own) { *own = {0, 1, 0}; }
inline void publish_arrivals() {}
inline void expect_bytes(Arrival *own, int bytes) {
    if (own->pending != 1) host::fail("a barrier in shared memory that nobody is expected at");
    own->pending = 0, own->bytes += bytes;
    host::arrived(own);
}
inline void send(int2 *own, unsigned rank, int2 value, Arrival *arrival) {
    *host::in_block(own, rank) = value;
    Arrival *at = host::in_block(arrival, rank);
    at->bytes -= sizeof value;
    host::arrived(at);
}
inline void await_bytes(Arrival *own, int phase) {
    while (own->phase == phase) host::yield();
}
inline int4 load_fresh(const int4 *address) { return *address; }
