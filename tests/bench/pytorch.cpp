/* What PyTorch's allocator costs, whichever it is in this process: its own, or one behind its
 * pluggable wrapper. A shared library that peer.py loads beside PyTorch. See measure.h.
 */
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include "measure.h"

using namespace measure;

/* The allocator that PyTorch uses now. */
struct Current {
    c10::cuda::CUDACachingAllocator::CUDAAllocator *allocator =
        c10::cuda::CUDACachingAllocator::get();

    void *take(size_t bytes, Stream stream) {
        return allocator->raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream));
    }

    void give(void *p, size_t, Stream) { allocator->raw_delete(p); }
};

/* The wrapper around an allocator that does nothing: what any pluggable one costs at least. */
struct Empty {
    std::shared_ptr<c10::cuda::CUDACachingAllocator::CUDAAllocator> allocator =
        torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
            [](size_t, int, cudaStream_t) -> void * { return &memory; },
            [](void *, size_t, int, cudaStream_t) {});
    static char memory;

    void *take(size_t bytes, Stream stream) {
        return allocator->raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream));
    }

    void give(void *p, size_t, Stream) { allocator->raw_delete(p); }
};

char Empty::memory;

template <class F> static int guarded(F run) try {
    run();
    return 0;
} catch (const std::exception &error) {
    fprintf(stderr, "pytorch: %s\n", error.what());
    return 1;
}

extern "C" int bench_pairs(int repeats, long count) {
    return guarded([&] {
        Current a;
        Driver driver;
        all_pairs(a, &driver, {repeats, count});
    });
}

extern "C" int bench_trace(const char *path, int passes) {
    return guarded([&] {
        Current a;
        Driver driver;
        a.give(a.take(512, nullptr), 512, nullptr);
        a.allocator->emptyCache();
        a.allocator->resetPeakStats(0);
        trace(a, path, passes, driver,
              [&] { return a.allocator->getDeviceStats(0).reserved_bytes[0].peak; });
        a.allocator->emptyCache();
    });
}

/* The same as a tensor asks for it: on the thread's current stream, whatever stream is passed. */
template <class A> struct AsTensor {
    A &a;

    void *take(size_t bytes, Stream) { return a.allocator->allocate(bytes).release_context(); }

    void give(void *p, size_t bytes, Stream stream) { a.give(p, bytes, stream); }
};

/* One pair through the wrapper, in turns with the empty allocator. */
extern "C" int bench_wrapper(int repeats, long count) {
    return guarded([&] {
        Current a;
        Empty empty;
        Driver driver;
        auto compare = [&](auto &a, auto &empty, const char *where, size_t bytes, Stream stream) {
            std::vector<double> ours, floor;
            for (int repeat = 0; repeat < repeats; repeat++) {
                ours.push_back(pair(a, bytes, stream, {1, count}));
                floor.push_back(pair(empty, bytes, stream, {1, count}));
            }
            printf("{\"bench\":\"wrapper\",\"where\":\"%s\",\"bytes\":%zu,\"ns\":%.1f,"
                   "\"floor_ns\":%.1f}\n",
                   where, bytes, median(ours), median(floor));
            fflush(stdout);
        };
        AsTensor<Current> tensor{a};
        AsTensor<Empty> nothing{empty};
        auto own = c10::cuda::getStreamFromPool();
        Stream made = driver.stream();
        for (size_t bytes : {512, 65536, 8 << 20}) {
            compare(a, empty, "the default stream", bytes, nullptr);
            compare(a, empty, "a created stream", bytes, made);
            c10::cuda::setCurrentCUDAStream(own);
            compare(tensor, nothing, "a tensor on a stream of PyTorch's", bytes, nullptr);
            c10::cuda::setCurrentCUDAStream(c10::cuda::getDefaultCUDAStream());
            compare(tensor, nothing, "a tensor on the default stream", bytes, nullptr);
        }
    });
}
