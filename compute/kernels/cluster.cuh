// Words of PTX for kernels of clusters of thread blocks, whose shared memory is one address space.
#pragma once

#define APART __noinline__
#define SHARED_MEMORY(TYPE, name) \
    extern __shared__ __align__(16) char memory[]; \
    TYPE &name = *(TYPE *)memory

typedef unsigned long long Arrival;  // a barrier in shared memory that counts bytes that come from other blocks

__device__ void await_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ unsigned remote(const void *own, unsigned rank) {
    unsigned address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"((unsigned)__cvta_generic_to_shared(own)), "r"(rank));
    return address;
}
__device__ void store_remote(int2 *own, unsigned rank, int2 value) {
    asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(remote(own, rank)), "r"(value.x), "r"(value.y)
                 : "memory");
}
__device__ void add_remote(int *own, unsigned rank, int value) {
    asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(remote(own, rank)), "r"(value) : "memory");
}
__device__ void init_arrival(Arrival *own) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((unsigned)__cvta_generic_to_shared(own)) : "memory");
}
__device__ void publish_arrivals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void expect_bytes(Arrival *own, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(own)),
                 "r"(bytes)
                 : "memory");
}
__device__ void send(int2 *own, unsigned rank, int2 value, Arrival *arrival) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                     remote(own, rank)),
                 "r"(value.x), "r"(value.y), "r"(remote(arrival, rank))
                 : "memory");
}
__device__ void await_bytes(Arrival *own, int phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"((unsigned)__cvta_generic_to_shared(own)),
        "r"(phase)
        : "memory");
}
__device__ int4 load_fresh(const int4 *address) { return __ldcg(address); }
__device__ void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}
