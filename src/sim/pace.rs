//! When queued work executes.

use std::collections::VecDeque;

/// How late a machine executes queued work. Work that a call waits for is always executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Executes when it is enqueued.
    Immediate,
    /// Nothing executes until a call waits for it, or a test steps it.
    Held,
    /// At each driver call some streams advance by some steps, pseudo-randomly from this seed.
    Random(u64),
    /// Executes this many ticks of the machine's clock after it is enqueued.
    Late(u64),
}

/// The pace and its state.
#[derive(Debug)]
pub(crate) struct Pacer {
    pub pace: Pace,
    pub now: u64,
    random: u64,
    /// Under [`Pace::Late`], what falls due when: tick, stream slot, sequence; in order of ticks.
    due: VecDeque<(u64, u32, u64)>,
}

impl Default for Pacer {
    fn default() -> Self {
        Pacer {
            pace: Pace::Immediate,
            now: 0,
            random: 1,
            due: VecDeque::new(),
        }
    }
}

impl Pacer {
    /// Changes the pace; nothing is due until it is scheduled anew.
    pub fn set(&mut self, pace: Pace) {
        self.pace = pace;
        self.due.clear();
        if let Pace::Random(seed) = pace {
            // Spread small seeds over all bits; xorshift must not start at zero.
            self.random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        }
    }

    /// Notes work enqueued just now.
    pub fn schedule(&mut self, slot: u32, sequence: u64) {
        if let Pace::Late(ticks) = self.pace {
            self.due
                .push_back((self.now.saturating_add(ticks), slot, sequence));
        }
    }

    /// Takes the next work whose tick has come; constant time.
    pub fn take_due(&mut self) -> Option<(u32, u64)> {
        let (_, slot, sequence) = *self.due.front().filter(|(tick, ..)| *tick <= self.now)?;
        self.due.pop_front();
        Some((slot, sequence))
    }

    /// The next pseudo-random number (xorshift64*).
    pub fn random(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }
}
