/* A convolution by cuDNN, with memory for its result and its workspace taken each time. The library is
 * declared as its header does: pip's packages have it without. */
#include "real.h"

extern "C" {
typedef void *object;
int cudnnCreate(object *handle);
int cudnnDestroy(object handle);
int cudnnCreateTensorDescriptor(object *tensor);
int cudnnSetTensor4dDescriptor(object tensor, int layout, int type, int n, int c, int h, int w);
int cudnnCreateFilterDescriptor(object *filter);
int cudnnSetFilter4dDescriptor(object filter, int type, int layout, int k, int c, int h, int w);
int cudnnCreateConvolutionDescriptor(object *convolution);
int cudnnSetConvolution2dDescriptor(object convolution, int pad_h, int pad_w, int step_h, int step_w,
                                    int dilation_h, int dilation_w, int mode, int type);
int cudnnGetConvolutionForwardWorkspaceSize(object handle, object x, object w, object convolution,
                                            object y, int algorithm, size_t *bytes);
int cudnnConvolutionForward(object handle, const void *alpha, object x, const void *x_data, object w,
                            const void *w_data, object convolution, int algorithm, void *workspace,
                            size_t bytes, const void *beta, object y, void *y_data);
}

/* CUDNN_TENSOR_NCHW, CUDNN_DATA_FLOAT, CUDNN_CROSS_CORRELATION and
 * CUDNN_CONVOLUTION_FWD_ALGO_IMPLICIT_PRECOMP_GEMM. */
enum { NCHW = 0, FLOAT = 0, CROSS_CORRELATION = 1, PRECOMPUTED = 1 };
enum { BATCH = 16, CHANNELS = 32, EDGE = 56, ROUNDS = 60 };
static const size_t COUNT = (size_t)BATCH * CHANNELS * EDGE * EDGE;

static object handle, image, filter, convolution;
static float *x, *w;
static double total;

static void loop(void) {
    const float one = 1, zero = 0;
    for (int round = 0; round < ROUNDS; round++) {
        size_t bytes;
        void *workspace = NULL;
        float *y, corner;
        CHECK(cudaMalloc((void **)&y, COUNT * sizeof *y * scale));
        CHECK(cudnnGetConvolutionForwardWorkspaceSize(handle, image, filter, convolution, image,
                                                      PRECOMPUTED, &bytes));
        if (bytes > 0)
            CHECK(cudaMalloc(&workspace, bytes));
        CHECK(cudnnConvolutionForward(handle, &one, image, x, filter, w, convolution, PRECOMPUTED,
                                      workspace, bytes, &zero, image, y));
        if (bytes > 0)
            CHECK(cudaFree(workspace));
        CHECK(cudaMemcpy(&corner, y + (size_t)round * 997, sizeof corner, cudaMemcpyDeviceToHost));
        CHECK(cudaFree(y));
        total += corner;
    }
}

int main(void) {
    size_t weights = (size_t)CHANNELS * CHANNELS * 3 * 3;
    float *host = (float *)malloc(COUNT * sizeof *host);
    for (size_t i = 0; i < COUNT; i++)
        host[i] = (float)(i % 5);
    CHECK(cudnnCreate(&handle));
    CHECK(cudnnCreateTensorDescriptor(&image));
    CHECK(cudnnSetTensor4dDescriptor(image, NCHW, FLOAT, BATCH, CHANNELS, EDGE, EDGE));
    CHECK(cudnnCreateFilterDescriptor(&filter));
    CHECK(cudnnSetFilter4dDescriptor(filter, FLOAT, NCHW, CHANNELS, CHANNELS, 3, 3));
    CHECK(cudnnCreateConvolutionDescriptor(&convolution));
    CHECK(cudnnSetConvolution2dDescriptor(convolution, 1, 1, 1, 1, 1, 1, CROSS_CORRELATION, FLOAT));
    CHECK(cudaMalloc((void **)&x, COUNT * sizeof *x));
    CHECK(cudaMalloc((void **)&w, weights * sizeof *w));
    CHECK(cudaMemcpy(x, host, COUNT * sizeof *x, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(w, host, weights * sizeof *w, cudaMemcpyHostToDevice));
    time_loop(loop);
    printf("sum: ~%.9g\n", total);
    CHECK(cudaFree(x));
    CHECK(cudaFree(w));
    CHECK(cudnnDestroy(handle));
    free(host);
    return 0;
}
