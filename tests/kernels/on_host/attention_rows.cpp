// Attention of many query rows on a host. Reads int32 number of group rows and of bytes of each, query rows,
// heads, k, layer offset, blocks and seed, float32 scale; then the group rows, int32 numbers of selected ones [.., k],
// -1 where empty, 2-byte queries [rows, heads, 512] and [rows, heads, 64]. Writes float16 [rows, splits, heads, 512] and
// float32 [rows, splits, heads, 2]. Each tensor and each group row is heap memory of just its size.
#include "attention_rows.cu"

template <typename Type> static Type *read_all(size_t count) {
    Type *values = (Type *)aligned_alloc(16, (count * sizeof(Type) + 15) / 16 * 16);
    if (fread(values, sizeof(Type), count, stdin) != count) abort();
    return values;
}
template <typename Type> static void write_all(Type *values, size_t count) {
    fwrite(values, sizeof(Type), count, stdout);
    free(values);
}

int main() {
    int *head = read_all<int>(8), count = head[0], rows = head[2], heads = head[3], k = head[4];
    float *scale = read_all<float>(1);
    std::vector<char *> group_rows;
    for (int i = 0; i < count; ++i) group_rows.push_back(read_all<char>(head[1]));
    int *numbers = read_all<int>((size_t)rows * k);
    std::vector<long long> addresses;
    for (int i = 0; i < rows * k; ++i) addresses.push_back(numbers[i] < 0 ? 0 : (long long)group_rows[numbers[i]]);
    unsigned short *latent = read_all<unsigned short>((size_t)rows * heads * DIMS);
    unsigned short *rope = read_all<unsigned short>((size_t)rows * heads * ROPE_DIMS);
    size_t entries = (size_t)rows * SPLITS * heads;
    unsigned short *partial = (unsigned short *)aligned_alloc(16, entries * DIMS * 2);
    float *softmax = (float *)malloc(entries * 8);
    memset(partial, 0xff, entries * DIMS * 2);
    memset(softmax, 0xff, entries * 8);
    host::grid = {(unsigned)head[6], 1};
    host::run({0, 0}, head[6], THREADS, head[7], [&] {
        attention_rows(addresses.data(), latent, rope, partial, softmax, rows, heads, k, head[5], *scale);
    });
    write_all(partial, entries * DIMS);
    write_all(softmax, entries * 2);
    for (char *row : group_rows) free(row);
    free(head), free(scale), free(numbers), free(latent), free(rope);
}
