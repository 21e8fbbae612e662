/* What concertina's C functions cost.
 *
 *   library LIBCONCERTINA pairs REPEATS PAIRS [sim]
 *   library LIBCONCERTINA trace PASSES FILE
 *   library LIBCONCERTINA bandwidth MIB
 *
 * `sim` is for CONCERTINA_CONF=driver:sim, where there is one stream. See measure.h.
 */
#include "measure.h"

#include "../../include/concertina.h"

using namespace measure;

struct Concertina {
    decltype(&concertina_malloc) malloc;
    decltype(&concertina_free) free;
    decltype(&concertina_empty_cache) empty_cache;
    decltype(&concertina_stats_json) stats_json;

    explicit Concertina(const char *path) {
        void *library = dlopen(path, RTLD_NOW);
        if (!library) throw std::runtime_error(dlerror());
        find(library, "concertina_malloc", malloc);
        find(library, "concertina_free", free);
        find(library, "concertina_empty_cache", empty_cache);
        find(library, "concertina_stats_json", stats_json);
    }

    template <class F> static void find(void *library, const char *name, F &function) {
        function = reinterpret_cast<F>(dlsym(library, name));
        if (!function) throw std::runtime_error(std::string("the library has no ") + name);
    }

    void *take(size_t bytes, Stream stream) {
        void *p = malloc(bytes, 0, static_cast<CUstream_st *>(stream));
        if (!p) throw std::runtime_error("out of memory");
        return p;
    }

    void give(void *p, size_t bytes, Stream stream) {
        free(p, bytes, 0, static_cast<CUstream_st *>(stream));
    }

    /* The most that was held so far. */
    size_t peak() const {
        std::vector<char> text(stats_json(nullptr, 0) + 4096);
        stats_json(text.data(), text.size());
        const char key[] = "\"reserved_bytes.all.peak\":";
        const char *found = strstr(text.data(), key);
        if (!found) throw std::runtime_error("no reserved_bytes.all.peak in the statistics");
        return strtoull(found + sizeof key - 1, nullptr, 10);
    }
};

/* Device copies from one half of a range to the other, in GB/s of copied bytes. */
static double copy(const Driver &driver, uint64_t range, size_t bytes) {
    void *events[2];
    for (auto &event : events) driver.call("cuEventCreate", &event, 0u);
    Stream stream = nullptr;
    driver.call("cuEventRecord", events[0], stream);
    for (int turn = 0; turn < 4; turn++)
        driver.call("cuMemcpyDtoDAsync_v2", range + bytes / 2, range, bytes / 2, stream);
    driver.call("cuEventRecord", events[1], stream);
    driver.call("cuEventSynchronize", events[1]);
    float ms = 0;
    driver.call("cuEventElapsedTime", &ms, events[0], events[1]);
    for (auto &event : events) driver.call("cuEventDestroy_v2", event);
    return 4.0 * (bytes / 2) / (ms * 1e6);
}

/* A copy inside one large block of the pool, as it comes from an empty pool and as it comes when the
 * pool's memory was used before in pieces of all sizes, beside one inside a cuMemAlloc block. */
static void bandwidth(Concertina &a, const Driver &driver, size_t bytes) {
    uint64_t plain = 0;
    driver.call("cuMemAlloc_v2", &plain, bytes);
    void *fresh = a.take(bytes, nullptr);
    auto measure = [&](const char *what, void *pool) {
        std::vector<double> ours, theirs;
        for (int turn = -1; turn < 9; turn++) {
            double mine = copy(driver, reinterpret_cast<uint64_t>(pool), bytes);
            double other = copy(driver, plain, bytes);
            if (turn < 0) continue;
            ours.push_back(mine);
            theirs.push_back(other);
        }
        printf("{\"bench\":\"bandwidth\",\"memory\":\"%s\",\"mib\":%zu,\"gb_per_s\":%.0f,"
               "\"plain_gb_per_s\":%.0f}\n",
               what, bytes >> 20, median(ours), median(theirs));
        fflush(stdout);
    };
    measure("fresh", fresh);
    a.give(fresh, bytes, nullptr);
    a.empty_cache();
    // Half of these stay until the large block is there, so that it has to be put together.
    Xorshift random;
    std::vector<std::pair<void *, size_t>> kept, freed;
    for (size_t taken = 0; taken < 2 * bytes;) {
        size_t size = (size_t(1) << 20) + random.next() % (63 << 20);
        (random.next() % 2 ? kept : freed).emplace_back(a.take(size, nullptr), size);
        taken += size;
    }
    for (auto &block : freed) a.give(block.first, block.second, nullptr);
    void *used = a.take(bytes, nullptr);
    measure("used before", used);
    a.give(used, bytes, nullptr);
    for (auto &block : kept) a.give(block.first, block.second, nullptr);
    driver.call("cuMemFree_v2", plain);
}

int main(int count, char **arguments) try {
    auto argument = [&](int at) -> const char * {
        if (at >= count) throw std::runtime_error("an argument is missing");
        return arguments[at];
    };
    Concertina a(argument(1));
    std::string what = argument(2);
    bool sim = count > 5 && !strcmp(arguments[5], "sim");
    if (what == "pairs" && sim) {
        all_pairs(a, nullptr, {atoi(argument(3)), atol(argument(4))});
        return 0;
    }
    Driver driver;
    if (what == "pairs") {
        all_pairs(a, &driver, {atoi(argument(3)), atol(argument(4))});
    } else if (what == "trace") {
        a.give(a.take(512, nullptr), 512, nullptr);
        a.empty_cache();
        trace(a, argument(4), atoi(argument(3)), driver, [&] { return a.peak(); });
    } else if (what == "bandwidth") {
        bandwidth(a, driver, size_t(atol(argument(3))) << 20);
    } else {
        throw std::runtime_error("there is nothing to measure of that name");
    }
    return 0;
} catch (const std::exception &error) {
    fprintf(stderr, "library: %s\n", error.what());
    return 1;
}
