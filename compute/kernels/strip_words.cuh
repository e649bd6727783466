// Words of PTX for products of a few rows (strips.cuh).
#pragma once

#define SHARED_MEMORY(TYPE, name) \
    extern __shared__ __align__(16) char memory[]; \
    TYPE &name = *(TYPE *)memory

__device__ void await_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// sum += a * b, of a warp: 16 rows of a weight times 8 of x, 16 columns of bfloat16.
__device__ void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four bytes of e4m3 as bfloat16, exactly, as compute/kernels/ptx.py does; here their signs are copied to where bfloat16 has
// its own, along with the bits between, which are cleared.
__device__ void bfloat16_of_e4m3(unsigned word, unsigned &low, unsigned &high) {
    asm("{ .reg .b32 a, b, factors;\n"
        "mov.b32 factors, 0x7b807b80;\n"
        "prmt.b32 a, %2, 0, 0x9180;\n"
        "prmt.b32 b, %2, 0, 0xb3a2;\n"
        "shl.b32 a, a, 4;\n"
        "shl.b32 b, b, 4;\n"
        "and.b32 a, a, 0x87f087f0;\n"
        "and.b32 b, b, 0x87f087f0;\n"
        "mul.rn.bf16x2 %0, a, factors;\n"
        "mul.rn.bf16x2 %1, b, factors; }"
        : "=r"(low), "=r"(high)
        : "r"(word));
}

// Copies to shared memory that are done when `await_copies` says so: past the multiprocessor's own cache, or through it.
__device__ void copy_once(uint4 *to, const unsigned char *from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}
__device__ void copy_shared(uint4 *to, const unsigned short *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}
__device__ void end_group_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all of the thread's groups but the last `pending` are done.
template <int pending>
__device__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

typedef unsigned long long Arrivals;  // a barrier in shared memory, for others to wait for copies
__device__ void init_arrivals(Arrivals *at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"((unsigned)__cvta_generic_to_shared(at)), "r"(count)
                 : "memory");
}
// Arrive when what the thread copied is there.
__device__ void arrive_with_copies(Arrivals *at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"((unsigned)__cvta_generic_to_shared(at))
                 : "memory");
}
// Until all have arrived; `phase` is 0 the first time, then 1, 0 and so on.
__device__ void await_arrivals(Arrivals *at, int phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"((unsigned)__cvta_generic_to_shared(at)),
        "r"(phase)
        : "memory");
}

// How many blocks took one before: what they wrote before can be read by the last.
__device__ int take_ticket(int *at) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
    return before;
}

__device__ unsigned short bfloat16_of(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// silu(gate) * up, as compute/kernels/triton_experts.py has it once compiled.
__device__ float gated_of(float gate, float up) {
    float power, share;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(__fsub_rn(0.0f, gate), 1.44269504f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(share) : "f"(gate), "f"(__fadd_rn(power, 1.0f)));
    return __fmul_rn(share, up);
}
