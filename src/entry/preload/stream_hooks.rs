//! Which stream a handle means, and its device: handles come back for other streams, numbers do not.

use super::abi::{self, Answer, OUT_OF_MEMORY};
use super::{driver_table, mutation, primary_context, retry_oom, stream_capture};
use concertina_engine::core::StreamKey;
use concertina_engine::device::Device;
use concertina_engine::device::InsertOnlyMap;
use concertina_engine::device::live_streams::LiveStreams;
use concertina_engine::process::allocator::allocator_in_use;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A stream, as far as the driver had to be asked for it.
pub struct Stream {
    handle: u64,
    /// The driver's number for it, unless it is a default stream.
    number: Option<u64>,
    /// Its device, where that has a pool and this is a stream of its primary context.
    pub device: Option<&'static Device>,
}

/// Devices of streams, at places by their numbers: the number in the upper bits, the device's plus one in
/// the lower 8. A number is one stream's for as long as the process lives, and so what is here stays true.
static DEVICES: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

/// The driver's numbers of streams whose creation was seen, by handle; 0 once they are destroyed.
static NUMBERS: InsertOnlyMap<1024> = InsertOnlyMap::new();

/// A stream as a function that ends in `_ptsz` reads it.
#[inline]
pub fn per_thread(stream: u64) -> u64 {
    match stream {
        0 if !mutation::is_on("per thread") => abi::PER_THREAD,
        _ => stream,
    }
}

/// `cuStreamCreate` and its like.
pub fn create(created: *mut u64, create: impl Fn() -> u32) -> Answer {
    let mut status = create();
    if status == OUT_OF_MEMORY
        && let Some(device) = primary_context::current_device_in_use()
    {
        status = retry_oom::retry(device, status, create);
    }
    if status == 0 {
        let mut id = 0;
        // SAFETY: the driver wrote the stream's handle there.
        let handle = unsafe { *created };
        // It is in no capture yet.
        if driver_table::ask!(cuStreamGetId(handle, &mut id)) == 0 {
            NUMBERS.insert(handle, id);
            LiveStreams::created().add(StreamKey { handle, id });
        }
    }
    Some(status)
}

/// `cuStreamDestroy`, which the driver is asked for next.
pub fn destroy(stream: u64) -> Answer {
    if stream > abi::PER_THREAD {
        stream_capture::destroy(stream);
        let devices = allocator_in_use().into_iter();
        for device in devices.flat_map(|it| it.devices_in_use()) {
            device.remove_stream(stream);
        }
        LiveStreams::created().remove(stream);
        NUMBERS.insert(stream, 0);
    }
    None
}

impl Stream {
    /// Asks the driver nothing of a stream whose creation was seen, but for its context at first. Where work of the stream's
    /// context has failed, or there is no such stream, the status that says so. To ask for the number of
    /// a stream that is being captured would end the capture.
    #[inline]
    pub fn of(handle: u64) -> Result<Stream, u32> {
        if handle <= abi::PER_THREAD || stream_capture::is_on() {
            let context = match handle <= abi::PER_THREAD && stream_capture::is_on() {
                // It may be part of the capture, and is asked nothing.
                true => primary_context::current(),
                false => primary_context::of_stream(handle)?,
            };
            return Ok(Stream {
                handle,
                number: None,
                device: primary_context::device_of_stream_context(context, handle),
            });
        }
        let mut number = NUMBERS.get(handle).unwrap_or(0);
        if number == 0 {
            match driver_table::ask!(cuStreamGetId(handle, &mut number)) {
                0 => {}
                status => return Err(status),
            }
        }
        let place = &DEVICES[number as usize % DEVICES.len()];
        let device = match place.load(Relaxed) {
            known if known >> 8 == number && known != 0 => device((known & 0xff) as i32 - 1),
            _ => {
                let context = primary_context::of_stream(handle)?;
                let device = primary_context::device_of_stream_context(context, handle);
                if let Some(device) = device {
                    place.store(number << 8 | (device.ordinal() as u64 + 1), Relaxed);
                }
                device
            }
        };
        Ok(Stream {
            handle,
            number: Some(if mutation::is_on("numbers") {
                1
            } else {
                number
            }),
            device,
        })
    }

    /// What tells its memory apart from other streams'.
    #[inline]
    pub fn key(&self, device: &Device) -> StreamKey {
        match self.number {
            Some(id) => StreamKey {
                handle: self.handle,
                id,
            },
            None => device.key(self.handle),
        }
    }
}

/// A device by its number, if it has a pool.
#[inline]
fn device(ordinal: i32) -> Option<&'static Device> {
    let mut devices = allocator_in_use()?.devices_in_use();
    devices.find(|device| device.ordinal() == ordinal)
}
