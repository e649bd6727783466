// Words of PTX for products of many rows (panels.cuh), beside those of strip_words.cuh.
#pragma once

#include "strip_words.cuh"

#define SHARED_PANELS(TYPE, name) \
    extern __shared__ __align__(1024) char memory[]; \
    TYPE &name = *(TYPE *)memory

typedef unsigned long long Barrier;  // in shared memory: counts arrivals, and bytes of copies

__device__ unsigned shared_address(const void *own) { return (unsigned)__cvta_generic_to_shared(own); }

// Registers of a warp group's threads, from here on.
template <int count>
__device__ void have_more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ void have_fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

__device__ void init_barrier(Barrier *own, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(own)), "r"(arrivals) : "memory");
}
__device__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void arrive_expecting(Barrier *own, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(own)), "r"(bytes) : "memory");
}
// At the same barrier of the cluster's block `rank`.
__device__ void arrive_at(Barrier *own, unsigned rank) {
    asm volatile(
        "{ .reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote]; }" ::"r"(shared_address(own)), "r"(rank)
        : "memory");
}
// Until the phase of this parity has ended; the one before the first has.
__device__ void await_phase(Barrier *own, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(own)), "r"(parity)
        : "memory");
}
// To the same place in every block of the cluster; each one's barrier counts the bytes.
template <int blocks>
__device__ void copy_to_cluster(void *to, const void *from, int bytes, Barrier *arrival) {
    if (blocks == 1)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(to)),
                     "l"(from), "r"(bytes), "r"(shared_address(arrival))
                     : "memory");
    else
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
            "%4;" ::"r"(shared_address(to)),
            "l"(from), "r"(bytes), "r"(shared_address(arrival)), "h"((unsigned short)((1 << blocks) - 1))
            : "memory");
}
__device__ unsigned rank_in_cluster() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Two warp groups take turns: each waits at its own barrier, where the other one lets it go on.
__device__ void await_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory"); }

// Both as bfloat16.
__device__ unsigned bfloat16_pair(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

#define FLOATS_4(array, i) "+f"(array[i]), "+f"(array[i + 1]), "+f"(array[i + 2]), "+f"(array[i + 3])
#define FLOATS_16(array, i) FLOATS_4(array, i), FLOATS_4(array, i + 4), FLOATS_4(array, i + 8), FLOATS_4(array, i + 12)

// sums = a * x, or += if `add`, of a warp group: 64 rows of a weight times twice as many of x as there are sums, 16
// columns.
__device__ void multiply_panel(float (&sums)[32], const unsigned (&a)[4], unsigned long long x, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0; }"
        : FLOATS_16(sums, 0), FLOATS_16(sums, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add));
}
__device__ void multiply_panel(float (&sums)[48], const unsigned (&a)[4], unsigned long long x, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
        "}, {%48, %49, %50, %51}, %52, add, 1, 1, 0; }"
        : FLOATS_16(sums, 0), FLOATS_16(sums, 16), FLOATS_16(sums, 32)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add));
}
__device__ void multiply_panel(float (&sums)[64], const unsigned (&a)[4], unsigned long long x, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0; }"
        : FLOATS_16(sums, 0), FLOATS_16(sums, 16), FLOATS_16(sums, 32), FLOATS_16(sums, 48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add));
}
__device__ void multiply_panel(float (&sums)[80], const unsigned (&a)[4], unsigned long long x, int add) {
    asm volatile(
        "{ .reg .pred add; setp.ne.b32 add, %85, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n160k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
        "}, {%80, %81, %82, %83}, %84, add, 1, 1, 0; }"
        : FLOATS_16(sums, 0), FLOATS_16(sums, 16), FLOATS_16(sums, 32), FLOATS_16(sums, 48),
          FLOATS_16(sums, 64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(x), "r"(add));
}

// Begin sums = a * x, or +=, of 64 columns. `x` is rows of 128 bytes, whose 16-byte words are exchanged: word i of row r
// is in place i ^ r % 8.
template <int count>
__device__ void begin_products(float (&sums)[count], const unsigned (&a)[4][4], const void *x, bool add) {
    // rows in eights of 1,024 bytes; exchanged by their addresses' bits 7 to 9
    unsigned long long matrix = (shared_address(x) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; step++) multiply_panel(sums, a[step], matrix + 2 * step, add || step > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until those begun are done, but the last `pending` halves: before, neither their `a` nor `sums` may be touched.
template <int pending, int count>
__device__ void await_products(float (&sums)[count], const unsigned (&a)[4][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("" ::"r"(a[i / 4][i % 4]) : "memory");
#pragma unroll
    for (int i = 0; i < count && pending == 0; i++) asm volatile("" : "+f"(sums[i])::"memory");
}
// Have `a` in its registers here, where there is time: the compiler would put it off. It does not know that it is `never`
// stored.
__device__ void settle(const unsigned (&a)[4][4], bool never, uint4 *to) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        asm volatile(
            "{ .reg .pred never; setp.ne.b32 never, %0, 0; @never st.shared.v4.b32 [%1], {%2, %3, %4, %5}; }" ::"r"((int)never),
            "r"(shared_address(to)), "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3])
            : "memory");
}
