//! What is said where there is no memory.

use crate::core::{ArenaId, Refusal, Shortage};
use crate::device::{Device, PoolId, State};
use std::fmt;

/// A request that could not be met, with all that a person needs to know about it.
#[derive(Clone, Debug)]
pub struct OutOfMemory {
    /// The device asked.
    pub device: i32,
    /// What was asked and what the pool looked like.
    pub shortage: Shortage,
    /// The limit in bytes, if one is set.
    pub limit: Option<u64>,
    /// Free and total bytes of the device, as the driver sees them.
    pub memory: Option<(u64, u64)>,
    /// The driver's name for an error that is not about memory.
    pub error: Option<String>,
    /// The private pool that it was to come from; (0, 0) for everybody's memory.
    pub pool: PoolId,
}

impl Device {
    pub(super) fn out_of_memory(
        &self,
        state: &mut State,
        asked: u64,
        shortage: Shortage,
        arena: ArenaId,
    ) -> Box<OutOfMemory> {
        let unsupplied = matches!(shortage.refusal, Refusal::Unsupplied(_));
        state.pool.counters_mut().ooms += u64::from(!unsupplied);
        Box::new(OutOfMemory {
            device: self.ordinal,
            shortage: Shortage { asked, ..shortage },
            limit: self.limit(),
            memory: state.pool.gpu().memory_info(),
            error: match shortage.refusal {
                Refusal::Failed(status) => Some(self.functions.error_name(status)),
                _ => None,
            },
            pool: state.pool_of(arena),
        })
    }
}

impl fmt::Display for OutOfMemory {
    /// Begins as PyTorch's message does: programs look for its first words. What is not about memory does
    /// not: to ask again for less would be no help.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage {
            asked,
            live,
            live_cuda,
            reserved,
            largest,
            other_arenas,
            chunk,
            refusal,
        } = self.shortage;
        if let Some(error) = &self.error {
            return write!(
                f,
                "CUDA error: {error} when {} were to be allocated on device {}",
                Bytes(asked),
                self.device
            );
        }
        write!(f, "CUDA out of memory. Tried to allocate ")?;
        if asked > EXABYTE {
            return write!(f, "more than 1EB memory.");
        }
        write!(f, "{}. GPU {}", Bytes(asked), self.device)?;
        match self.memory {
            Some((free, total)) => {
                let (free, total) = (Bytes(free), Bytes(total));
                write!(
                    f,
                    " has a total capacity of {total} of which {free} is free"
                )?;
            }
            None => write!(f, " does not say what is free")?,
        }
        write!(f, ". In use by the program: {}", Bytes(live - live_cuda))?;
        if live_cuda > 0 {
            write!(f, "; by other libraries: {}", Bytes(live_cuda))?;
        }
        write!(
            f,
            "; held by the allocator: {}; largest free range: {}",
            Bytes(reserved),
            Bytes(largest)
        )?;
        if let Some(limit) = self.limit {
            write!(f, "; limit: {}", Bytes(limit))?;
        }
        let Some((free, total)) = self.memory else {
            return write!(f, ".");
        };
        let outside = total.saturating_sub(free).saturating_sub(reserved);
        match refusal {
            Refusal::OverLimit if free > asked => {
                write!(
                    f,
                    ". The limit stands in the way: the device has room for this request."
                )
            }
            _ if (reserved - live).saturating_sub(other_arenas) > asked => match chunk {
                0 => write!(
                    f,
                    ". Free memory lies in pieces between blocks in use, which are not joined in \
                     plain segments (expandable_segments:False) nor in private pools."
                ),
                1..=SMALLEST_CHUNK => write!(
                    f,
                    ". Free memory lies in pieces between blocks in use, too small to be joined: a \
                     memory snapshot shows whose blocks those are."
                ),
                _ => write!(
                    f,
                    ". Free memory lies in pieces between blocks in use: smaller chunks lose less \
                     to that (CONCERTINA_CONF=chunk_size_mb:2)."
                ),
            },
            _ if other_arenas > asked => write!(
                f,
                ". PrivatePool pools, as CUDA graphs have them, hold {} that is free for them alone.",
                Bytes(other_arenas)
            ),
            Refusal::OutOfMemory if free > asked => write!(
                f,
                ". The device has room for this request: the driver, or this process (ulimit -v), has \
                 run out of something else, such as addresses."
            ),
            _ if outside > asked && outside > reserved => {
                write!(
                    f,
                    ". Others, or this program by other means, hold {}.",
                    Bytes(outside)
                )
            }
            _ => write!(
                f,
                ". The program needs more than there is: use less at a time."
            ),
        }
    }
}

/// Requests above this are told apart by PyTorch, whose words are used (`one_exa_bytes` in its
/// `CUDACachingAllocator.cpp`).
const EXABYTE: u64 = 1 << 60;

/// Chunks of this size cannot be told to be smaller: the unit of `chunk_size_mb`.
const SMALLEST_CHUNK: u64 = 2 << 20;

/// Bytes for a person.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes @ ..1024 => write!(f, "{bytes} bytes"),
            bytes @ ..0x10_0000 => write!(f, "{:.2} KiB", bytes as f64 / 1024.0),
            bytes @ ..0x4000_0000 => write!(f, "{:.2} MiB", bytes as f64 / 1_048_576.0),
            bytes => write!(f, "{:.2} GiB", bytes as f64 / 1_073_741_824.0),
        }
    }
}
