// Words of PTX for the splits of attention of many query rows (attention_rows.cu).
#pragma once

#define SHARED_MEMORY(TYPE, name) \
    extern __shared__ __align__(1024) char memory[]; \
    TYPE &name = *(TYPE *)memory

typedef unsigned long long Arrivals;  // a barrier in shared memory that counts those who arrive, again and again
typedef unsigned long long Operand;   // of the matrix unit, in shared memory: rows of 128 bytes, swizzled, in 64s

__device__ unsigned shared_address(const void *own) { return (unsigned)__cvta_generic_to_shared(own); }

__device__ void await_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ void init(Arrivals *own, int expected) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(own)), "r"(expected) : "memory");
}
__device__ void publish_arrivals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void arrive(Arrivals *own) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(own)) : "memory");
}
// Until all have arrived for the time whose number is as odd or even as `parity`; the first is 0.
__device__ void await(Arrivals *own, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(own)),
        "r"(parity)
        : "memory");
}
// What the thread stored, or saw arrive, can then be read by the matrix unit.
__device__ void publish_to_matrix_unit() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int registers>
__device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// 16 bytes to shared memory, 0 where there are none.
__device__ void copy(unsigned char *to, long long from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(present ? 16 : 0)
                 : "memory");
}
// Once the thread's copies so far are there.
__device__ void arrive_with_copies(Arrivals *own) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(own)) : "memory");
}

__device__ float exp2_of(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
__device__ float quotient_of(float dividend, float divisor) {
    float result;
    asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(dividend), "f"(divisor));
    return result;
}
__device__ unsigned halves_of(float low, float high) {
    unsigned halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(high), "f"(low));
    return halves;
}

#define OWN4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OWN16(d, i) OWN4(d, i), OWN4(d, i + 4), OWN4(d, i + 8), OWN4(d, i + 12)
#define OWN32(d) OWN16(d, 0), OWN16(d, 16)
#define OWN128(d) OWN32(d), OWN16(d, 32), OWN16(d, 48), OWN16(d, 64), OWN16(d, 80), OWN16(d, 96), OWN16(d, 112)
#define OWN_WORDS4(a, i) "+r"(a[i]), "+r"(a[i + 1]), "+r"(a[i + 2]), "+r"(a[i + 3])
#define NAMES32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES128 \
    NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, " \
    "%74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
    "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Operands whose sums run along the 64 columns of float16, and along the rows, of as many columns as there are rows of
// 128 bytes one behind the other.
__device__ Operand by_columns(const void *own) { return 0x4000004000010000ull | (shared_address(own) >> 4 & 0x3fff); }
__device__ Operand by_rows(const void *own) { return 0x4000004002000000ull | (shared_address(own) >> 4 & 0x3fff); }
__device__ Operand moved(Operand operand, int bytes) { return operand + bytes / 16; }

// The products of a warpgroup: begun, added one by one, 16 columns or rows of each operand at a time, ended, awaited.
__device__ void begin_products(float (&sum)[32]) { asm volatile("wgmma.fence.sync.aligned;" : OWN32(sum)::"memory"); }
__device__ void begin_products(float (&sum)[128]) { asm volatile("wgmma.fence.sync.aligned;" : OWN128(sum)::"memory"); }
__device__ void begin_products(float (&sum)[128], unsigned (&a)[16]) {  // a's rows are in registers
    begin_products(sum);
    asm volatile("" : OWN_WORDS4(a, 0), OWN_WORDS4(a, 4), OWN_WORDS4(a, 8), OWN_WORDS4(a, 12));
}
__device__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ void await_products(float (&sum)[32]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : OWN32(sum) : "n"(pending) : "memory");
}
template <int pending>
__device__ void await_products(float (&sum)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned %128;" : OWN128(sum) : "n"(pending) : "memory");
}
// 64 rows of a times 64 rows of b.
__device__ void multiply(float (&sum)[32], Operand a, Operand b, bool add) {
    asm volatile(
        "{ .reg .pred add;\n"
        "setp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" NAMES32 "}, %32, %33, add, 1, 1, 0, 0; }"
        : OWN32(sum)
        : "l"(a), "l"(b), "r"((int)add));
}
// 64 rows of a times 256 columns of b.
__device__ void multiply(float (&sum)[128], Operand a, Operand b, bool add) {
    asm volatile(
        "{ .reg .pred add;\n"
        "setp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" NAMES128 "}, %128, %129, add, 1, 1, 0, 1; }"
        : OWN128(sum)
        : "l"(a), "l"(b), "r"((int)add));
}
// The same of a in registers, four words of each thread.
__device__ void multiply(float (&sum)[128], const unsigned *a, Operand b, bool add) {
    asm volatile(
        "{ .reg .pred add;\n"
        "setp.ne.b32 add, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" NAMES128 "}, {%128, %129, %130, %131}, %132, "
        "add, 1, 1, 1; }"
        : OWN128(sum)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
