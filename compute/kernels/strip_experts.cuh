// Which experts rows chose: see compute/kernels/strips.py.
//
// Defined by whoever compiles it, too: CHOICES of each row; SHARED, whether there is a shared expert, slot 0;
// MOST_EXPERTS that there can be.
#pragma once

#include "strip_weights.cuh"

// The experts that any row chose, by number.
class Chosen {
    static_assert(MOST_EXPERTS == 1024, "a word for each lane of a warp");
    unsigned used[MOST_EXPERTS / 32];
    int numbers[ROWS][CHOICES];  // every warp asks for them; in memory they would be one line, and all blocks wait for it

public:
    // To be called by all threads of the block.
    __device__ void read(const int *chosen, int m) {
        for (int i = threadIdx.x; i < MOST_EXPERTS / 32; i += THREADS) used[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < m * CHOICES; i += THREADS) {
            int number = __ldcg(chosen + i);  // not from the multiprocessor's own cache, which may be of an earlier kernel
            numbers[i / CHOICES][i % CHOICES] = number;
            atomicOr(&used[number / 32], 1u << number % 32);
        }
        __syncthreads();
    }
    // These are to be called by a whole warp.
    __device__ int count() const { return __reduce_add_sync(~0u, __popc(used[threadIdx.x % 32])); }
    // The expert in place `rank` among them, or -1 if there are no more.
    __device__ int number(int rank) const {
        int lane = threadIdx.x % 32, count = __popc(used[lane]), until = count;
        for (int distance = 1; distance < 32; distance *= 2) {
            int before = __shfl_up_sync(~0u, until, distance);
            if (lane >= distance) until += before;
        }
        int word = __ffs(__ballot_sync(~0u, rank < until)) - 1;
        if (word < 0) return -1;
        unsigned bits = used[word];
        for (int i = __shfl_sync(~0u, until - count, word); i < rank; i++) bits &= bits - 1;
        return word * 32 + __ffs(bits) - 1;
    }
    // The expert's place among the choices of a row, from 1, or -1 if it is not among them.
    __device__ int place(int row, int number) const {
        int place = -1;
        for (int choice = 0; choice < CHOICES; choice++)
            if (numbers[row][choice] == number) place = 1 + choice;
        return place;
    }
    // That of the row whose number the lane has.
    __device__ int place_of_lane(int m, int number) const {
        int row = threadIdx.x % 32;
        return row < m ? place(row, number) : -1;
    }
};
