/* concertina: a CUDA memory allocator. Made from src/entry by scripts/header.sh. */

#ifndef CONCERTINA_H
#define CONCERTINA_H

#include <stddef.h>

/** A CUDA stream, as in `cudaStream_t` and `CUstream`. */
struct CUstream_st;

/**
 * The name of a private pool: PyTorch's `MempoolId_t`, a pair of numbers passed by value.
 */
struct concertina_pool_id {
  /**
   * The pool's number where it was made for a CUDA graph, else 0.
   */
  unsigned long long graph;
  /**
   * The pool's number where a program made it, else 0.
   */
  unsigned long long user;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Writes the statistics of every device, one JSON object, to the caller's `buffer`.
 *
 * At most `capacity` bytes are written, the last of them always a terminating NUL; a text that does
 * not fit is cut short. `buffer` may be null if `capacity` is 0, to ask for the length alone.
 *
 * Returns the length of the whole text in bytes, without the NUL: a buffer of one byte more would
 * have held it. The text grows as the program runs, so leave some room when asking twice. Returns 0,
 * and an empty text, in a process that was forked from one that had used the library.
 *
 * Any thread may call it. A device that another thread keeps locked for a second is marked
 * `"busy": true` and has no figures.
 */
size_t concertina_stats_json(char *buffer,
                             size_t capacity);

/**
 * Writes the statistics of every device, one JSON object and a line feed, to a file.
 *
 * In `path`, `%p` stands for the process's id, `%h` for the host's name, `%r` for the rank that a
 * launcher gave the process (RANK, OMPI_COMM_WORLD_RANK or SLURM_PROCID, else 0) and `%%` for a per
 * cent sign. A null `path` means the path in the environment variable CONCERTINA_STATS as it was
 * when the library was loaded. The string stays the caller's.
 *
 * The file appears whole or not at all: it is written under another name in the same directory and
 * renamed. A regular file of the same user's is replaced; anything else at `path` is left alone.
 *
 * Returns 0, or an errno value after one line on standard error that says what went wrong: EINVAL
 * for a path that means nothing (or a null one without CONCERTINA_STATS), ELOOP for a symbolic link,
 * EPERM for another user's file, EBUSY when another thread has been writing for a second, ECHILD in
 * a process that was forked from one that had used the library, EIO for a mistake of the library's,
 * and what the system says otherwise.
 *
 * Any thread may call it.
 */
int concertina_dump_stats(const char *path);

/**
 * Returns the library's version, such as "0.1.0": a string that ends in a NUL, is never freed and
 * lasts as long as the process. Any thread may call it.
 */
const char *concertina_version(void);

/**
 * Hands out `size` bytes of `device`'s memory, ready for work on `stream`.
 *
 * `size` is in bytes and rounded up to 512; `device` is the CUDA device's number; `stream` is a
 * stream of that device, null for the default one. The address is aligned to 512 bytes. The memory
 * is not cleared. It stays the library's and goes back with `concertina_free`.
 *
 * Returns null for a size of 0; null after one line on standard error when there is no memory, no
 * such device or no CUDA driver; null in a process forked from one that had used the library.
 *
 * Any thread may call it. It waits for the GPU when memory has run out, and otherwise only to keep
 * the number of old mappings bounded.
 */
void *concertina_malloc(size_t size, int device, struct CUstream_st *stream);

/**
 * Takes back what `concertina_malloc` handed out.
 *
 * `pointer` is an address that `concertina_malloc` returned, or null, which does nothing. `size`,
 * `device` and `stream` are what was passed then; they make the memory quicker to find, and the
 * stream may have been destroyed. The stream that the memory was allocated on may get it again at
 * once, another one when the work before is done, and nobody before the streams named by
 * `concertina_record_stream` are done with it.
 *
 * An address that is not in use is left alone, with one line on standard error the first time.
 *
 * Any thread may call it. It does not wait for the GPU, except for memory that a stream of another
 * device was recorded on: that waits for the other device.
 */
void concertina_free(void *pointer, size_t size, int device, struct CUstream_st *stream);

/**
 * Prepares the library for `device_count` devices. Not needed: the first allocation does it too.
 *
 * Any thread may call it.
 */
void concertina_init(int device_count);

/**
 * Gives all memory that is free, in whole chunks, back to the driver, on every device.
 *
 * Waits for the GPU where free memory may still be in use. Any thread may call it.
 */
void concertina_empty_cache(void);

/**
 * Limits what the library may hold on `device` to `fraction` of the device's memory.
 *
 * `fraction` is from 0.0 to 1.0; 1.0 lifts the limit. What is held beyond the limit stays, so call
 * `concertina_empty_cache` too. Another value is refused with one line on standard error.
 *
 * Any thread may call it.
 */
void concertina_memory_fraction(double fraction, int device);

/**
 * Finds the allocation that `pointer` is part of to CUDA: an address that `concertina_malloc`
 * returned. That is what `cudaIpcGetMemHandle` shares as a whole, and so what the distance that goes
 * with a handle counts from: in mapped memory the block itself, in a private pool all memory without
 * a gap around it, and where the driver allocates plain memory, its allocation.
 *
 * Writes the allocation's size in bytes to `size`, which may be null, and returns its address.
 * Returns null, and writes 0, if `pointer` is not the start of a block in use.
 *
 * Any thread may call it.
 */
void *concertina_base_alloc(void *pointer,
                            size_t *size);

/**
 * Notes that `stream` uses the memory at `pointer`, besides the stream that it was allocated on.
 *
 * Once freed, the memory is not used again before `stream`'s work up to then is done, even if the
 * stream has been destroyed by then. `pointer` is
 * an address that `concertina_malloc` returned, or null, which does nothing; an address that is not
 * in use is left alone, with one line on standard error the first time.
 *
 * Any thread may call it. It never waits for the GPU.
 */
void concertina_record_stream(void *pointer, struct CUstream_st *stream);

/**
 * From now on, allocations on `device` that `filter` claims come from the private pool `pool`,
 * which shares no memory with others; it is made if there is none of that name, and counts one
 * user more.
 *
 * `filter` points to a C++ `std::function<bool(cudaStream_t)>` (of libstdc++, 32 bytes), which is
 * copied; an empty one claims nothing. The copy is dropped by `concertina_end_allocate_to_pool`.
 * The filter is called with the stream of each allocation and may not allocate.
 *
 * Any thread may call it. Until the end is called the library does not wait for the GPU, because a
 * stream may be in capture.
 */
void concertina_begin_allocate_to_pool(int device,
                                       struct concertina_pool_id pool,
                                       const void *filter);

/**
 * Ends what `concertina_begin_allocate_to_pool` began: no more allocations go to the pool by it.
 *
 * Any thread may call it.
 */
void concertina_end_allocate_to_pool(int device, struct concertina_pool_id pool);

/**
 * Takes one user from the private pool `pool`. With the last one its free memory goes back to the
 * driver, and the rest when it is freed.
 *
 * Any thread may call it.
 */
void concertina_release_pool(int device, struct concertina_pool_id pool);

/**
 * Fits PyTorch's Python functions to the library now, in a process whose Python was started, or has
 * imported torch, after the library was loaded, as it is under LD_PRELOAD. Does nothing where that is
 * done, and without Python or torch.
 *
 * Any thread may call it, and waits for the interpreter's lock if it does not hold it.
 */
void concertina_attach(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* CONCERTINA_H */
