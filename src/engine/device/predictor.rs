//! Predictors: whether a stream without a stream cache would hit in one, and so is to get one.
//!
//! A predictor simulates a small stream cache: it sees the stream's allocations and frees, and does what the
//! cache would do, with sizes in place of blocks. While a stream only misses it pauses for longer and longer,
//! so that a stream of random sizes pays next to nothing.

use crate::device::stream_cache::{HIT_SCORE, OPEN_SCORE, is_cacheable};

/// Blocks in the simulated cache.
const LENGTH: usize = 4;

/// Predictors of a device. A power of two.
const PREDICTORS: usize = 64;

/// Misses in a row after which a predictor pauses.
const MISSES_TO_PAUSE: u32 = 32;

/// Requests that the first pause lasts. Each further one in a row lasts twice as long, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: u32 = 256;

/// To look at one request in nine, as with [`FIRST_PAUSE`], takes a thirtieth of the time of an allocation
/// and a free. A loop that begins in a pause has no stream cache until the pause ends.
const LONGEST_PAUSE: u32 = 1 << 11;

/// The predictor of a stream without an open stream cache.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub struct Predictor {
    /// The requested bytes of the blocks that would be cached.
    cached: [u64; LENGTH],
    length: usize,
    /// The block that was allocated last.
    last: u64,
    /// What the stream cache's score would be.
    score: u32,
    /// Misses left until a pause.
    misses_left: u32,
    /// Requests left in the pause; 0 if there is none.
    pause: u32,
    /// Requests that the next pause lasts.
    next_pause: u32,
}

/// The predictors of a device, by the numbers of the streams' free lists; streams may share one. Under the
/// device's lock.
pub struct Predictors([Predictor; PREDICTORS]);

impl Predictors {
    pub fn new() -> Self {
        let new = Predictor {
            cached: [0; LENGTH],
            length: 0,
            last: 0,
            // A new stream gets a stream cache at once: the first request, a miss, leaves `OPEN_SCORE`.
            score: OPEN_SCORE + 1,
            misses_left: MISSES_TO_PAUSE,
            pause: 0,
            next_pause: FIRST_PAUSE,
        };
        Predictors([new; PREDICTORS])
    }

    /// The predictor of a stream, by the number of its free list.
    #[inline]
    pub fn of(&mut self, list: u16) -> &mut Predictor {
        &mut self.0[list as usize % PREDICTORS]
    }
}

impl Predictor {
    /// To be called when the stream frees a block.
    #[inline]
    pub fn on_free(&mut self, address: u64, requested: u64) {
        if self.pause == 0 && self.length < LENGTH && is_cacheable(requested, address, self.last) {
            self.cached[self.length] = requested;
            self.length += 1;
        }
    }

    /// To be called when the stream allocates a block. True if its stream cache is to be opened.
    #[inline]
    pub fn on_allocate(&mut self, address: u64, requested: u64) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        self.simulate(address, requested)
    }

    /// The allocation in the simulated cache.
    #[inline(never)]
    fn simulate(&mut self, address: u64, requested: u64) -> bool {
        self.last = address;
        match self.cached[..self.length]
            .iter()
            .rposition(|it| *it == requested)
        {
            Some(at) => {
                self.length -= 1;
                self.cached[at] = self.cached[self.length];
                self.score += HIT_SCORE;
                (self.misses_left, self.next_pause) = (MISSES_TO_PAUSE, FIRST_PAUSE);
            }
            // A miss clears the cache.
            None => {
                self.length = 0;
                self.score = self.score.saturating_sub(1);
                self.misses_left -= 1;
                if self.misses_left == 0 {
                    (self.misses_left, self.pause) = (MISSES_TO_PAUSE, self.next_pause);
                    self.next_pause = (2 * self.next_pause).min(LONGEST_PAUSE);
                }
            }
        }
        let opens = self.score >= OPEN_SCORE;
        if opens {
            self.score = 0;
        }
        opens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::SMALL;

    /// Whether a stream cache opens for a stream that over and over allocates blocks of these sizes and frees
    /// them, the last one first.
    fn opens_for(sizes: &[u64]) -> bool {
        let mut predictors = Predictors::new();
        let predictor = predictors.of(1);
        // The cache that every new stream gets.
        while !predictor.on_allocate(0, u64::MAX) {}
        (0..1000).any(|_| {
            let blocks: Vec<(u64, u64)> = (1..).zip(sizes.iter().copied()).collect();
            let opens = blocks
                .iter()
                .any(|(block, size)| predictor.on_allocate(*block, *size));
            for (block, size) in blocks.iter().rev() {
                predictor.on_free(*block, *size);
            }
            opens
        })
    }

    #[test]
    fn predictor_opens_a_stream_cache_that_would_hit() {
        assert!(opens_for(&[512]));
        assert!(opens_for(&[2 * SMALL]));
        assert!(opens_for(&[512, 512, 1024]));
        // The simulated cache is full before the size that is requested next.
        let many: Vec<u64> = (1..=12).map(|it| it * 512).collect();
        assert!(!opens_for(&many));
        // Of large blocks only the one allocated last is cached.
        assert!(!opens_for(&[2 * SMALL, 3 * SMALL, 4 * SMALL]));
    }

    #[test]
    fn predictor_opens_a_stream_cache_soon_after_requests_repeat() {
        let mut predictors = Predictors::new();
        let predictor = predictors.of(1);
        for misses in [1, 100, 10_000, 1_000_000] {
            for size in 1..=misses {
                predictor.on_allocate(size, size);
            }
            // Then each request is for what was just freed.
            let opens = (0..LONGEST_PAUSE + MISSES_TO_PAUSE + OPEN_SCORE).any(|_| {
                let opens = predictor.on_allocate(1, 512);
                predictor.on_free(1, 512);
                opens
            });
            assert!(opens, "after {misses}");
        }
    }
}
