//! The ledger of one device: bytes reserved from the driver against the limit, and count and time of driver
//! calls.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

macro_rules! calls {
    ($($variant:ident = $name:literal,)*) => {
        /// The driver calls that are counted and timed, by the driver's own names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub enum Call { $($variant,)* }

        impl Call {
            /// Every call, in the order of the enum.
            pub const ALL: &[Call] = &[$(Call::$variant,)*];

            /// The driver's name.
            pub fn name(self) -> &'static str {
                match self { $(Call::$variant => $name,)* }
            }
        }
    };
}

calls! {
    Create = "cuMemCreate",
    Release = "cuMemRelease",
    Map = "cuMemMap",
    SetAccess = "cuMemSetAccess",
    Unmap = "cuMemUnmap",
    Reserve = "cuMemAddressReserve",
    FreeAddress = "cuMemAddressFree",
    Alloc = "cuMemAlloc",
    Free = "cuMemFree",
    Export = "cuMemExportToShareableHandle",
    Import = "cuMemImportFromShareableHandle",
    OpenShared = "cuIpcOpenMemHandle",
    Record = "cuEventRecord",
    RecordDevice = "cuCtxRecordEvent",
    Order = "cuStreamWaitEvent",
    Query = "cuEventQuery",
    QueryStream = "cuStreamQuery",
    Synchronize = "cuCtxSynchronize",
}

/// How often a call was made and what that took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallFigures {
    /// Calls made.
    pub count: u64,
    /// Their time in all, in nanoseconds.
    pub nanoseconds: u64,
    /// Calls that failed.
    pub failed: u64,
}

#[derive(Default)]
struct AtomicFigures {
    count: AtomicU64,
    nanoseconds: AtomicU64,
    failed: AtomicU64,
}

/// Written under the device's lock only; read by any thread.
pub struct Ledger {
    /// Bytes that the pool has from the driver.
    reserved: AtomicU64,
    /// Bytes that the program has from the driver itself, and that count towards the limit.
    unpooled: AtomicU64,
    limit: AtomicU64,
    calls: [AtomicFigures; Call::ALL.len()],
}

impl Ledger {
    pub fn new() -> Self {
        Ledger {
            reserved: AtomicU64::new(0),
            unpooled: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
            calls: Default::default(),
        }
    }

    /// Makes a driver call, and counts and times it. A query that answers "not ready" is no failure.
    pub fn call(&self, call: Call, body: impl FnOnce() -> u32) -> u32 {
        let start = Instant::now();
        let status = body();
        let counted = &self.calls[call as usize];
        counted
            .nanoseconds
            .fetch_add(start.elapsed().as_nanos() as u64, Relaxed);
        counted.count.fetch_add(1, Relaxed);
        if status != 0 && call != Call::Query {
            counted.failed.fetch_add(1, Relaxed);
        }
        status
    }

    /// Count and time of a call so far.
    pub fn figures(&self, call: Call) -> CallFigures {
        let counted = &self.calls[call as usize];
        CallFigures {
            count: counted.count.load(Relaxed),
            nanoseconds: counted.nanoseconds.load(Relaxed),
            failed: counted.failed.load(Relaxed),
        }
    }

    /// Whether `size` more bytes are within the limit.
    pub fn allows(&self, size: u64) -> bool {
        let reserved = self.reserved.load(Relaxed) + self.unpooled();
        reserved.saturating_add(size) <= self.limit.load(Relaxed)
    }

    /// Counts `size` bytes more as reserved.
    pub fn add(&self, size: u64) {
        self.reserved.fetch_add(size, Relaxed);
    }

    /// Counts `size` bytes less.
    pub fn subtract(&self, size: u64) {
        self.reserved.fetch_sub(size, Relaxed);
    }

    /// Bytes that the program has from the driver itself.
    pub fn unpooled(&self) -> u64 {
        self.unpooled.load(Relaxed)
    }

    /// Sets [`Ledger::unpooled`].
    pub fn set_unpooled(&self, bytes: u64) {
        self.unpooled.store(bytes, Relaxed);
    }

    /// The limit in bytes; `u64::MAX` where there is none.
    pub fn limit(&self) -> u64 {
        self.limit.load(Relaxed)
    }

    /// Sets the limit in bytes.
    pub fn set_limit(&self, limit: u64) {
        self.limit.store(limit, Relaxed);
    }
}
