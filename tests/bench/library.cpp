/* What concertina's C functions cost.
 *
 *   library LIBCONCERTINA pairs REPEATS PAIRS [sim]
 *   library LIBCONCERTINA trace PASSES FILE
 *   library LIBCONCERTINA bandwidth MIB
 *
 * `sim` is for the stand-in driver, where there is one stream. See measure.h.
 */
#include "measure.h"

#include <sys/mman.h>

#include <new>

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

/* Memory of so many objects, zeroed, in huge pages where the system has them. */
template <class T> static T *huge(size_t count) {
    size_t page = 2u << 20, bytes = (count * sizeof(T) + page - 1) / page * page;
    void *memory = aligned_alloc(page, bytes);
    if (!memory) throw std::bad_alloc();
    madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<T *>(memset(memory, 0, bytes));
}

/* What no allocator that works like this one can do without: for a pair on a created stream, to ask the driver
 * whether it is still the same stream; for any free, to find the block by its address. The second is a hash
 * table and what it points to, a cache line a block, in a loop that does nothing else. */
static void floors(const Driver *driver, Effort effort) {
    auto measure = [&](const std::string &what, auto work) {
        double ns = timed(effort, [&] {
            for (long i = 0; i < effort.pairs; i++) work();
        });
        printf("{\"bench\":\"floor\",\"what\":\"%s\",\"ns\":%.1f}\n", what.c_str(), ns);
        fflush(stdout);
    };
    if (driver) {
        using Captured = int (*)(Stream, int *);
        using Number = int (*)(Stream, unsigned long long *);
        auto captured = reinterpret_cast<Captured>(dlsym(driver->library, "cuStreamIsCapturing"));
        auto number = reinterpret_cast<Number>(dlsym(driver->library, "cuStreamGetId"));
        Stream stream = driver->stream();
        measure("asking the driver which stream a created one is", [&] {
            int status;
            unsigned long long id;
            captured(stream, &status);
            number(stream, &id);
        });
    }
    struct alignas(64) Node {
        uint64_t more[8];
    };
    for (size_t live : {100, 10000, 1000000}) {
        size_t places = 1;
        while (places < 4 * live) places *= 2;
        auto place_of = [&](uint64_t address) {
            return (address / 512 * 0x9E3779B97F4A7C15ull >> 32) & (places - 1);
        };
        auto address_of = [](uint64_t block) { return block * 8192; };
        Node *nodes = huge<Node>(live);
        uint32_t *table = huge<uint32_t>(places);
        Xorshift random;
        // Blocks lie in the array in no order.
        for (size_t i = 0; i < live; i++) table[place_of(address_of(i))] = uint32_t(random.next() % live);
        uint64_t sum = 0;
        measure("finding one of " + std::to_string(live) + " blocks by its address", [&] {
            // Which one is next depends on the last, so that they do not overlap.
            uint64_t block = (random.next() + (sum & 1)) % live;
            sum += nodes[table[place_of(address_of(block))]].more[0] + 2;
        });
        if (sum & 1) printf("\n");
        free(nodes);
        free(table);
    }
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
        Effort effort{atoi(argument(3)), atol(argument(4))};
        all_pairs(a, nullptr, effort);
        floors(nullptr, effort);
        return 0;
    }
    Driver driver;
    if (what == "pairs") {
        Effort effort{atoi(argument(3)), atol(argument(4))};
        all_pairs(a, &driver, effort);
        floors(&driver, effort);
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
