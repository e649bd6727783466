// The words of compute/kernels/panel_words.cuh for a host: see host.cuh. What a copy or a product will write is there as
// late as it may be: a copy's when its barrier is asked, a product's when it is awaited. Until then the place of a copy
// is poisoned for the address sanitizer, and operands and sums of a product must not change.
#pragma once

#include <deque>
#include <map>
#include <utility>

#include "strip_words.cuh"

#define SHARED_PANELS SHARED_MEMORY

struct Barrier { int arrivals, pending, bytes, phase; };

namespace host {

struct Bulk { char *to; const char *from; int bytes; };
inline std::map<::Barrier *, std::vector<Bulk>> bulks;  // on their way
inline std::map<std::pair<Block *, int>, Barrier> turns;

inline void arrived(::Barrier *at) {
    if (at->pending == 0 && at->bytes == 0) at->phase++, at->pending = at->arrivals;
}
inline void deliver(::Barrier *at) {
    for (Bulk bulk : std::exchange(bulks[at], {})) {
        ASAN_UNPOISON_MEMORY_REGION(bulk.to, bulk.bytes);
        memcpy(bulk.to, bulk.from, bulk.bytes);
        at->bytes -= bulk.bytes;
    }
    arrived(at);
}

// Four steps of a thread's products, begun and not awaited.
struct Products {
    const void *operands;
    unsigned before[16];  // the operands, as they must stay
    float a[2][64];       // the thread's rows
    const unsigned char *x;
    bool add;
};
struct Pending {
    std::deque<Products> products;
    std::vector<float> sums;  // as they must stay
};
inline std::map<Thread *, Pending> pending;

inline float of_panel(const unsigned char *x, int row, int column) {
    unsigned short bits;
    memcpy(&bits, x + row * 128 + (column / 8 ^ row % 8) * 16 + column % 8 * 2, 2);
    return half_of(bits, 0);
}

}  // namespace host

template <int> void have_more_registers() {}
template <int> void have_fewer_registers() {}

inline void init_barrier(Barrier *own, int arrivals) { *own = {arrivals, arrivals, 0, 0}; }
inline void publish_barriers() {}
inline void arrive_expecting(Barrier *own, int bytes) {
    own->bytes += bytes;
    if (own->pending-- <= 0) host::fail("a barrier that has all its arrivals");
    host::arrived(own);
}
inline void arrive_at(Barrier *own, unsigned rank) {
    Barrier *at = host::in_block(own, rank);
    if (at->pending-- <= 0) host::fail("a barrier that has all its arrivals");
    host::arrived(at);
}
inline void await_phase(Barrier *own, int parity) {
    host::await([=] {
        if (!host::bulks[own].empty()) host::deliver(own);
        return (own->phase & 1) != parity;
    });
}
template <int blocks> void copy_to_cluster(void *to, const void *from, int bytes, Barrier *arrival) {
    if (!host::self->kernel_before_ended) host::fail("reads what the kernel before may still be writing");
    if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) host::fail("a copy that is not aligned");
    for (int rank = 0; rank < blocks; rank++) {
        char *there = host::in_block((char *)to, rank);
        host::in_block((char *)to + bytes - 1, rank);
        ASAN_POISON_MEMORY_REGION(there, bytes);
        host::bulks[host::in_block(arrival, rank)].push_back({there, (const char *)from, bytes});
    }
}
inline unsigned rank_in_cluster() { return host::self->block - host::blocks.data(); }
inline void cluster_barrier() { host::leave(host::cluster, host::arrive(host::cluster, host::threads_of_cluster())); }

inline void await_turn(int group) {
    host::Barrier &barrier = host::turns[{host::self->block, group}];
    host::leave(barrier, host::arrive(barrier, 256));
}
inline void give_turn(int group) { host::arrive(host::turns[{host::self->block, group}], 256); }

inline unsigned bfloat16_pair(float low, float high) {
    return host::bfloat16_of(low) | (unsigned)host::bfloat16_of(high) << 16;
}

template <int count> void begin_products(float (&sums)[count], const unsigned (&a)[4][4], const void *x, bool add) {
    if ((uintptr_t)x % 1024) host::fail("rows of x that are not aligned");
    host::Products own{a, {}, {}, (const unsigned char *)x, add};
    memcpy(own.before, a, sizeof own.before);
    int lane = threadIdx.x % 32;
    for (int step = 0; step < 4; step++) {
        std::array<unsigned, 4> words;
        memcpy(&words, a[step], sizeof words);
        auto lanes = host::of_warp(words);
        for (int i = 0; i < 16; i++)
            for (int high = 0; high < 2; high++)
                own.a[high][step * 16 + i] = host::half_of(lanes[lane / 4 * 4 + i / 2 % 4][i / 8 * 2 + high], i % 2);
    }
    host::Pending &pending = host::pending[host::self];
    if (pending.products.empty()) pending.sums.assign(sums, sums + count);
    pending.products.push_back(own);
}
template <int left, int count> void await_products(float (&sums)[count], const unsigned (&a)[4][4]) {
    host::Pending &pending = host::pending[host::self];
    const void *awaited = nullptr;
    while (pending.products.size() > left) {
        host::Products &first = pending.products.front();
        if (memcmp(first.operands, first.before, sizeof first.before)) host::fail("operands that changed");
        if (memcmp(sums, pending.sums.data(), sizeof sums)) host::fail("sums that changed");
        for (int i = 0; i < count; i++) {
            float sum = first.add ? sums[i] : 0.0f;
            int row = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            for (int k = 0; k < 64; k++) sum += first.a[i / 2 % 2][k] * host::of_panel(first.x, row, k);
            sums[i] = sum;
        }
        pending.sums.assign(sums, sums + count);
        awaited = first.operands;
        pending.products.pop_front();
    }
    if (awaited != a) host::fail("other products than those awaited");
    __syncwarp();  // as the warp's threads wait together
}
inline void settle(const unsigned (&)[4][4], bool never, uint4 *) {
    if (never) host::fail("stores what it should not");
}
