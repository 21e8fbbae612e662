//! Streams that are known to exist: those whose creation was seen, and whose destruction would be seen, and
//! permanent ones. The driver may crash when it is passed a destroyed stream.

use crate::core::StreamKey;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::LazyLock;

/// Those that the program was seen to create.
static CREATED: LazyLock<LiveStreams> = LazyLock::new(LiveStreams::default);

/// Streams by handle, with their ids.
#[derive(Default)]
pub struct LiveStreams(Mutex<HashMap<u64, u64>>);

impl LiveStreams {
    /// Those that the program was seen to create, on any device.
    pub fn created() -> &'static LiveStreams {
        &CREATED
    }

    /// Adds a stream that exists.
    pub fn add(&self, key: StreamKey) {
        self.0.lock().insert(key.handle, key.id);
    }

    /// The number of streams.
    #[allow(clippy::len_without_is_empty, reason = "nobody asks that")]
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// The stream with this handle.
    pub fn find(&self, handle: u64) -> Option<StreamKey> {
        let id = self.0.lock().get(&handle).copied();
        id.map(|id| StreamKey { handle, id })
    }

    /// Removes the stream with this handle, which is about to be destroyed. Returns once no thread is in
    /// [`LiveStreams::with`] for it.
    pub fn remove(&self, handle: u64) {
        self.0.lock().remove(&handle);
    }

    /// Removes all, as their context ends.
    pub fn clear(&self) {
        self.0.lock().clear();
    }

    /// Calls a function for a stream if it exists; it is not destroyed meanwhile.
    pub fn with<R>(&self, key: StreamKey, body: impl FnOnce() -> R) -> Option<R> {
        let streams = self.0.lock();
        let exists = streams.get(&key.handle) == Some(&key.id);
        exists.then(body)
    }
}
