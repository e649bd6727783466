// CUDA's own words for a host: thread blocks that run together (a cluster, or one block), each thread a coroutine that
// others replace where it waits for them. Shared memory is a block's own heap memory, so that the compiler's sanitizers
// see what runs past its end; the order in which threads get their turn is drawn from a seed.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
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
#define SHARED_MEMORY(TYPE, name) TYPE &name = *(TYPE *)host::own_shared(sizeof(TYPE))
#define threadIdx (host::self->thread_index)
#define blockIdx (host::self->block_index)
#define gridDim (host::grid)

using std::max;
using std::min;

struct int2 { int x, y; };
struct float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
inline float __int_as_float(int bits) { float value; memcpy(&value, &bits, 4); return value; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
template <typename Type> Type __ldcg(const Type *address) { return *address; }
template <typename Type> Type __ldg(const Type *address) { return *address; }

namespace host {

constexpr int STACK = 1 << 17;
struct Index { unsigned x, y; };

struct Barrier { int arrived = 0, generation = 0; };
struct Warp {
    Barrier barrier;
    char brought[2][32][48];
};
struct Block {
    char *shared = nullptr;
    size_t bytes = 0;
    int running = 0;
    int flags = 0;  // that threads brought to a barrier
    Barrier barrier;
    std::vector<Warp> warps;
};
struct Copy { uint4 *to; int group; };
struct Thread {
    ucontext_t context;
    Index thread_index, block_index;
    Block *block;
    int cluster_generation = 0;
    bool kernel_before_ended = false, done = false;
    std::vector<Copy> copies;  // on their way
    int groups_of_copies = 0;
};

inline Thread *self;
inline ucontext_t scheduler;
inline std::vector<Block> blocks;
inline Index grid;
inline Barrier cluster;
inline std::function<void()> kernel;
inline long progress;  // threads that began, or went on from where they waited

[[noreturn]] inline void fail(const char *what) {
    Index block = self->block_index;
    fprintf(stderr, "block %u, %u, thread %u: %s\n", block.x, block.y, self->thread_index.x, what);
    abort();
}
template <typename Condition> void await(Condition condition) {
    while (!condition()) swapcontext(&self->context, &scheduler);
    ++progress;
}
// The generation that a thread arrives in; it may leave when that has gone.
inline int arrive(Barrier &barrier, int expected) {
    int generation = barrier.generation;
    if (++barrier.arrived == expected) barrier.arrived = 0, ++barrier.generation;
    return generation;
}
inline void leave(const Barrier &barrier, int generation) {
    await([&] { return barrier.generation != generation; });
}
inline void *own_shared(size_t bytes) {
    Block &block = *self->block;
    if (!block.shared) {
        if (posix_memalign((void **)&block.shared, 1024, (bytes + 15) / 16 * 16)) fail("no memory");
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
inline int threads_of_cluster() {
    int threads = 0;
    for (Block &block : blocks) threads += block.warps.size() * 32;
    return threads;
}
// Waits for all lanes of the warp; returns what each of them brought.
template <typename Type> std::array<Type, 32> of_warp(const Type &own) {
    Warp &warp = self->block->warps[self->thread_index.x / 32];
    auto &brought = warp.brought[warp.barrier.generation & 1];
    static_assert(sizeof own <= sizeof brought[0]);
    memcpy(brought[self->thread_index.x % 32], &own, sizeof own);
    leave(warp.barrier, arrive(warp.barrier, 32));
    std::array<Type, 32> all;
    for (int lane = 0; lane < 32; ++lane) memcpy(&all[lane], brought[lane], sizeof own);
    return all;
}
inline void start() {
    ++progress;
    kernel();
    self->done = true;
    --self->block->running;
    swapcontext(&self->context, &scheduler);
}
// Runs `count` blocks, of which the first is `first` and the others follow in x; returns when all their threads have.
inline void run(Index first, unsigned count, unsigned threads, unsigned seed, std::function<void()> body) {
    kernel = body;
    blocks.assign(count, Block());
    cluster = Barrier();
    std::vector<Thread> all(count * threads);
    char *stacks = (char *)mmap(nullptr, all.size() * STACK, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (size_t i = 0; i < all.size(); ++i) {
        Thread &thread = all[i];
        thread.block = &blocks[i / threads];
        thread.block->running = threads;
        thread.block->warps.resize(threads / 32);
        thread.thread_index = {unsigned(i % threads), 0};
        thread.block_index = {unsigned(first.x + i / threads), first.y};
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = stacks + i * STACK;
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, start, 0);
    }
    std::vector<Thread *> turns;
    for (Thread &thread : all) turns.push_back(&thread);
    std::mt19937 random(seed + first.x + first.y);
    unsigned held = -1;  // the warp that gets no turns for a while, so that others run ahead
    for (unsigned round = 0; !turns.empty(); ++round) {
        if (seed) std::shuffle(turns.begin(), turns.end(), random);
        if (seed && round % 40 == 0) held = random() % (threads / 32);
        long before = progress;
        for (Thread *thread : turns) {
            if (thread->thread_index.x / 32 == held) continue;
            self = thread;
            swapcontext(&scheduler, &thread->context);
        }
        if (progress == before && held == -1u) fail("no thread gets what it waits for");
        if (progress == before) held = -1;
        std::erase_if(turns, [](Thread *thread) { return thread->done; });
    }
    for (Block &block : blocks) free(block.shared);
    munmap(stacks, all.size() * STACK);
}

}  // namespace host

inline void __syncthreads() {
    host::Block &block = *host::self->block;
    host::leave(block.barrier, host::arrive(block.barrier, block.warps.size() * 32));
}
inline bool __syncthreads_or(bool flag) {
    int &flags = host::self->block->flags;
    flags += flag;
    __syncthreads();
    bool any = flags > 0;
    __syncthreads();
    flags = 0;
    __syncthreads();
    return any;
}
inline void __syncwarp() { host::of_warp(0); }
inline int __shfl_up_sync(unsigned, int value, int distance) {
    int lane = threadIdx.x % 32;
    return host::of_warp(value)[lane >= distance ? lane - distance : lane];
}
inline int __shfl_sync(unsigned, int value, int lane) { return host::of_warp(value)[lane]; }
inline int __reduce_add_sync(unsigned, int value) {
    unsigned sum = 0;
    for (int brought : host::of_warp(value)) sum += brought;
    return sum;
}
inline int __reduce_max_sync(unsigned, int value) {
    auto values = host::of_warp(value);
    return *std::max_element(values.begin(), values.end());
}
inline unsigned __ballot_sync(unsigned, bool flag) {
    auto flags = host::of_warp(flag);
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) ballot |= (unsigned)flags[lane] << lane;
    return ballot;
}
inline bool __any_sync(unsigned all, bool flag) { return __ballot_sync(all, flag) != 0; }
inline int atomicAdd(int *at, int value) { int before = *at; *at += value; return before; }
inline unsigned atomicOr(unsigned *at, unsigned value) { unsigned before = *at; *at |= value; return before; }

inline void await_kernel_before() { host::self->kernel_before_ended = true; }
