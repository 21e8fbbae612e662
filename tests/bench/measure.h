/* What the benchmarks measure, for any allocator: an object with `take(bytes, stream)` and
 * `give(pointer, bytes, stream)`. A result is a line of JSON on standard output; times are
 * nanoseconds, medians of several repeats.
 */
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace measure {

using Stream = void *;

inline double now() {
    using namespace std::chrono;
    return duration<double, std::nano>(steady_clock::now().time_since_epoch()).count();
}

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    size_t n = values.size();
    return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

/* The CUDA driver, as far as it is needed here; found at run time, so that this builds without CUDA. */
struct Driver {
    void *library;

    Driver() : library(dlopen("libcuda.so.1", RTLD_NOW)) {
        if (!library) throw std::runtime_error("there is no libcuda.so.1");
        call("cuInit", 0u);
        context();
    }

    template <class... Arguments> int attempt(const char *name, Arguments... arguments) const {
        auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
        if (!function) throw std::runtime_error(std::string("libcuda.so.1 has no ") + name);
        return function(arguments...);
    }

    template <class... Arguments> void call(const char *name, Arguments... arguments) const {
        int status = attempt(name, arguments...);
        if (status) throw std::runtime_error(std::string(name) + ": " + std::to_string(status));
    }

    /* Makes device 0's primary context this thread's. */
    void context() const {
        void *context = nullptr;
        call("cuDevicePrimaryCtxRetain", &context, 0);
        call("cuCtxSetCurrent", context);
    }

    /* A stream that waits for no other. */
    Stream stream() const {
        Stream stream = nullptr;
        call("cuStreamCreate", &stream, 1u);
        return stream;
    }
};

/* How much of everything. */
struct Effort {
    int repeats;
    long pairs;
};

struct Xorshift {
    uint64_t state = 88172645463325252ull;

    uint64_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state;
    }
};

/* Nanoseconds for each of the pairs that `work` does: the median of the repeats, after one to warm up. */
template <class Work> double timed(Effort effort, Work work) {
    std::vector<double> times;
    for (int repeat = -1; repeat < effort.repeats; repeat++) {
        double start = now();
        work();
        if (repeat >= 0) times.push_back((now() - start) / effort.pairs);
    }
    return median(times);
}

template <class A> void pairs(A &a, size_t bytes, Stream stream, long n) {
    for (long i = 0; i < n; i++) {
        void *p = a.take(bytes, stream);
        a.give(p, bytes, stream);
    }
}

/* The same block over and over, on one thread. */
template <class A> double pair(A &a, size_t bytes, Stream stream, Effort effort) {
    return timed(effort, [&] { pairs(a, bytes, stream, effort.pairs); });
}

/* Nanoseconds after which a load that goes on the same way is taken to have settled. */
constexpr double SETTLED = 3e8;

/* So many blocks live, of sizes over so many octaves from 512 bytes, replaced at random. */
template <class A> double mixed(A &a, long live, int octaves, Stream stream, Effort effort) {
    struct Block {
        void *address;
        size_t bytes;
    };
    Xorshift random;
    std::vector<size_t> sizes(4096);
    for (auto &bytes : sizes) {
        uint64_t x = random.next();
        bytes = size_t(512) << x % octaves;
        bytes += (x >> 32) % bytes;
    }
    size_t next = 0;
    auto take = [&] {
        size_t bytes = sizes[next++ & 4095];
        return Block{a.take(bytes, stream), bytes};
    };
    std::vector<Block> blocks(live);
    for (auto &block : blocks) block = take();
    // Which block is next is known one ahead and fetched: a million of them fit into no cache, and what is
    // measured is not this list.
    size_t chosen = random.next() % live;
    auto replace = [&](long n) {
        for (long i = 0; i < n; i++) {
            auto &block = blocks[chosen];
            chosen = random.next() % live;
            __builtin_prefetch(&blocks[chosen], 1);
            a.give(block.address, block.bytes, stream);
            block = take();
        }
    };
    // Each block was replaced about once before it counts, and an allocator had time to find out what of its
    // work pays.
    double began = now();
    replace(live);
    while (now() - began < SETTLED) replace(std::max(1l, effort.pairs / 4));
    std::vector<double> times;
    for (int repeat = 0; repeat < effort.repeats; repeat++) {
        double start = now();
        replace(effort.pairs);
        times.push_back((now() - start) / effort.pairs);
    }
    for (auto &block : blocks) a.give(block.address, block.bytes, stream);
    return median(times);
}

/* So many threads at once, each on its stream of these; wall time over all their pairs. */
template <class A>
double threads(A &a, size_t count, const std::vector<Stream> &streams, const Driver *driver,
               Effort effort) {
    std::vector<double> times;
    for (int repeat = -1; repeat < effort.repeats; repeat++) {
        std::atomic<size_t> ready{0};
        std::atomic<bool> go{false};
        std::vector<std::thread> all;
        for (size_t t = 0; t < count; t++)
            all.emplace_back([&, t] {
                if (driver) driver->context();
                pairs(a, 65536, streams[t % streams.size()], 100);
                ready++;
                while (!go) std::this_thread::yield();
                pairs(a, 65536, streams[t % streams.size()], effort.pairs);
            });
        while (ready < count) std::this_thread::yield();
        double start = now();
        go = true;
        for (auto &thread : all) thread.join();
        if (repeat >= 0) times.push_back((now() - start) / (double(effort.pairs) * count));
    }
    return median(times);
}

/* Every measurement of pairs. Without a driver (the simulated GPU) all is on the default stream. */
template <class A> void all_pairs(A &a, const Driver *driver, Effort effort) {
    std::vector<Stream> streams;
    for (int i = 0; i < 8; i++) streams.push_back(driver ? driver->stream() : nullptr);
    auto print = [](const std::string &what, double ns) {
        printf("{%s,\"ns\":%.1f}\n", what.c_str(), ns);
        fflush(stdout);
    };
    for (size_t kib : {0, 64, 1024, 8192, 65536}) {
        size_t bytes = kib ? kib << 10 : 512;
        std::string what = "\"bench\":\"pair\",\"bytes\":" + std::to_string(bytes);
        print(what, pair(a, bytes, streams[0], effort));
        // Most programs know no other stream.
        if (driver) print(what + ",\"stream\":\"default\"", pair(a, bytes, nullptr, effort));
    }
    const std::string random = "\"bench\":\"mixed\",\"live\":2000";
    if (driver) print(random, mixed(a, 2000, 15, streams[0], effort));
    print(random + ",\"stream\":\"default\"", mixed(a, 2000, 15, nullptr, effort));
    for (size_t own : {1, 0})
        for (size_t count : {1, 2, 4, 8}) {
            // One thread on one stream is measured once; a simulated GPU has one stream.
            if (own ? !driver && count > 1 : count == 1) continue;
            std::vector<Stream> used(streams.begin(), streams.begin() + (own ? count : 1));
            print("\"bench\":\"threads\",\"threads\":" + std::to_string(count) +
                      ",\"streams\":" + std::to_string(used.size()),
                  threads(a, count, used, driver, effort));
        }
    for (long live : {100, 10000, 1000000})
        print("\"bench\":\"scale\",\"stream\":\"default\",\"live\":" + std::to_string(live),
              mixed(a, live, 7, nullptr, effort));
}

/* An event of a trace, as bench.py packs it: 0 bytes free. */
struct Event {
    uint64_t bytes;
    uint32_t id;
    uint32_t stream;
};

struct Trace {
    std::vector<Event> events;
    std::vector<Stream> streams;
    std::vector<void *> live;
    std::vector<Event> taken;

    Trace(const char *path, const Driver &driver) {
        FILE *file = fopen(path, "rb");
        if (!file) throw std::runtime_error(std::string(path) + ": can't be read");
        Event event;
        uint32_t ids = 0, count = 1;
        while (fread(&event, sizeof event, 1, file) == 1) {
            events.push_back(event);
            ids = std::max(ids, event.id);
            count = std::max(count, event.stream + 1);
        }
        fclose(file);
        // The first one is the default stream.
        streams.push_back(nullptr);
        while (streams.size() < count) streams.push_back(driver.stream());
        live.resize(ids + 1);
        taken.resize(ids + 1);
    }

    /* Once through; nanoseconds an event. What is left is freed outside the time. */
    template <class A> double pass(A &a) {
        double start = now();
        for (const auto &event : events) {
            if (event.bytes) {
                live[event.id] = a.take(event.bytes, streams[event.stream]);
                taken[event.id] = event;
            } else {
                const auto &block = taken[event.id];
                a.give(live[event.id], block.bytes, streams[block.stream]);
                live[event.id] = nullptr;
            }
        }
        double ns = (now() - start) / events.size();
        for (size_t id = 0; id < live.size(); id++)
            if (live[id]) {
                a.give(live[id], taken[id].bytes, streams[taken[id].stream]);
                live[id] = nullptr;
            }
        return ns;
    }
};

/* A trace from an empty pool, and again. `peak` says the most bytes held so far. */
template <class A, class Peak>
void trace(A &a, const char *path, int passes, const Driver &driver, Peak peak) {
    Trace trace(path, driver);
    double cold = trace.pass(a);
    size_t cold_peak = peak();
    std::vector<double> warm;
    for (int pass = 1; pass < passes; pass++) warm.push_back(trace.pass(a));
    printf("{\"bench\":\"trace\",\"events\":%zu,\"cold_ns\":%.1f,\"cold_reserved\":%zu,"
           "\"reserved\":%zu",
           trace.events.size(), cold, cold_peak, peak());
    if (!warm.empty()) printf(",\"warm_ns\":%.1f", median(warm));
    printf("}\n");
    fflush(stdout);
}

} // namespace measure
