/* Matrix products by cuBLAS, the result of each in memory of its own. The library is declared as its
 * header does: pip's packages have it without. */
#include "real.h"

extern "C" {
int cublasCreate_v2(void **handle);
int cublasDestroy_v2(void *handle);
int cublasSgemm_v2(void *handle, int across, int transposed, int rows, int columns, int depth,
                   const float *alpha, const float *a, int a_rows, const float *b, int b_rows,
                   const float *beta, float *c, int c_rows);
int cublasSasum_v2(void *handle, int count, const float *x, int step, float *result);
}

enum { EDGE = 512, ROUNDS = 100 };

static void *handle;
static float *a, *b, last;

static void loop(void) {
    const float one = 1, zero = 0;
    for (int round = 0; round < ROUNDS; round++) {
        int rows = EDGE - 32 * (round % 8);
        float *c, sum;
        CHECK(cudaMalloc((void **)&c, sizeof *c * (size_t)rows * EDGE * scale));
        CHECK(cublasSgemm_v2(handle, 0, 0, rows, EDGE, EDGE, &one, a, EDGE, b, EDGE, &zero, c, rows));
        CHECK(cublasSasum_v2(handle, rows * EDGE, c, 1, &sum));
        CHECK(cudaFree(c));
        last = sum;
    }
}

int main(void) {
    size_t bytes = sizeof *a * EDGE * EDGE;
    float *host = (float *)malloc(bytes);
    for (int i = 0; i < EDGE * EDGE; i++)
        host[i] = (float)(i % 7);
    CHECK(cublasCreate_v2(&handle));
    CHECK(cudaMalloc((void **)&a, bytes));
    CHECK(cudaMalloc((void **)&b, bytes));
    CHECK(cudaMemcpy(a, host, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(b, host, bytes, cudaMemcpyHostToDevice));
    time_loop(loop);
    printf("sum: ~%.9g\n", last);
    CHECK(cublasDestroy_v2(handle));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    free(host);
    return 0;
}
