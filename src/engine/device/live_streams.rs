//! Streams that are known to exist: those whose creation was seen and whose destruction would be, and those
//! that are never destroyed. The driver crashes where it is handed a stream that is gone.

use crate::core::StreamKey;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::LazyLock;

/// Those that the program was seen to create.
static CREATED: LazyLock<LiveStreams> = LazyLock::new(LiveStreams::default);

/// Streams by their handles, with their numbers.
#[derive(Default)]
pub struct LiveStreams(Mutex<HashMap<u64, u64>>);

impl LiveStreams {
    /// Those that the program was seen to create, on any device.
    pub fn created() -> &'static LiveStreams {
        &CREATED
    }

    /// A stream exists from now on.
    pub fn add(&self, key: StreamKey) {
        self.0.lock().insert(key.handle, key.id);
    }

    /// How many there are.
    #[allow(clippy::len_without_is_empty, reason = "nobody asks that")]
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// The stream with this handle.
    pub fn find(&self, handle: u64) -> Option<StreamKey> {
        let id = self.0.lock().get(&handle).copied();
        id.map(|id| StreamKey { handle, id })
    }

    /// The stream with this handle is about to be destroyed. Returns once nobody uses it.
    pub fn remove(&self, handle: u64) {
        self.0.lock().remove(&handle);
    }

    /// All went with their context.
    pub fn clear(&self) {
        self.0.lock().clear();
    }

    /// Does something with a stream if it exists; it does until that is done.
    pub fn with<R>(&self, key: StreamKey, body: impl FnOnce() -> R) -> Option<R> {
        let streams = self.0.lock();
        let exists = streams.get(&key.handle) == Some(&key.id);
        exists.then(body)
    }
}
