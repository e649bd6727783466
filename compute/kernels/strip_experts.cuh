// Which experts rows chose: see compute/kernels/strips.py.
//
// Defined by whoever compiles it, too: CHOICES of each row; SHARED, whether there is a shared expert, slot 0;
// MOST_EXPERTS that there can be.
#pragma once

#include "strip_weights.cuh"

// The experts that any row chose, by number.
class Chosen {
    unsigned used[MOST_EXPERTS / 32];

public:
    // To be called by all threads of the block.
    __device__ void read(const int *chosen, int m) {
        for (int i = threadIdx.x; i < MOST_EXPERTS / 32; i += THREADS) used[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < m * CHOICES; i += THREADS) {
            int number = __ldcg(chosen + i);  // not from the multiprocessor's own cache, which may be of an earlier kernel
            atomicOr(&used[number / 32], 1u << number % 32);
        }
        __syncthreads();
    }
    __device__ int count() const {
        int sum = 0;
        for (unsigned word : used) sum += __popc(word);
        return sum;
    }
    // The expert in place `rank` among them, or -1 if there are no more.
    __device__ int number(int rank) const {
        for (int word = 0; word < MOST_EXPERTS / 32; word++) {
            int count = __popc(used[word]);
            if (rank < count) {
                unsigned bits = used[word];
                for (int i = 0; i < rank; i++) bits &= bits - 1;
                return word * 32 + __ffs(bits) - 1;
            }
            rank -= count;
        }
        return -1;
    }
};

// Of row `lane` of the warp: 1 + the expert's place among its choices, or -1.
__device__ int place_of(const int *chosen, int m, int number) {
    int row = threadIdx.x % 32, place = -1;
    for (int choice = 0; choice < CHOICES; choice++)
        if (row < m && __ldcg(chosen + row * CHOICES + choice) == number) place = 1 + choice;
    return place;
}
