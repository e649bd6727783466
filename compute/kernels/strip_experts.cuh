// Which experts rows chose: see strips.py.
//
// Defined by whoever compiles it, too: CHOICES of each row; SHARED, whether there is a shared expert, slot 0;
// MOST_EXPERTS that there can be.
#pragma once

#include "strips.cuh"

// The experts that any row chose, by number.
class Chosen {
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
    // Where among a row's choices an expert is, or -1 if it is not.
    __device__ int place(int row, int number) const {
        for (int choice = 0; choice < CHOICES; choice++)
            if (numbers[row][choice] == number) return choice;
        return -1;
    }
};
