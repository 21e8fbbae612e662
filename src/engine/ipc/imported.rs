//! Memory of other processes that is mapped here. Each span is mapped once, however much of it is open,
//! and stays as long as anybody holds it.

use crate::core::{BlockInfo, UNORDERED};
use crate::device::Device;
use crate::ipc::socket::{Question, ask};
use crate::ipc::{Handle, Secret, SegmentHandle, Unshared, exported};
use crate::process::lifecycle;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

/// What is open, as far as it is held.
static OPEN: Mutex<Option<HashMap<Key, Weak<Imported>>>> = Mutex::new(None);

/// What nobody holds any more, but could not be taken down because of a capture.
static LATE: Mutex<Vec<Mapping>> = Mutex::new(Vec::new());

/// A span of a process, or a plain segment, in the context of one device.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    /// With the secret, so that nobody gets what is open by its number alone; where an allocation's number
    /// and secret have led to it, there is none.
    Span([u8; 16], u64, Secret, i32),
    Segment(SegmentHandle, i32),
}

enum Kind {
    /// Chunks at reserved addresses, as many bytes as are mapped.
    Chunks { mapped: u64 },
    /// What CUDA opened.
    Segment,
}

struct Mapping {
    device: &'static Device,
    address: u64,
    /// Where CUDA opened it, it does not say how many: all that there can be.
    bytes: u64,
    kind: Kind,
}

/// Memory of another process. It can be used until this is dropped, which waits for the device: work
/// that uses it may still run. In a forked child, whose parent has it open, nothing is done then.
pub struct Imported {
    /// Taken when it is dropped.
    mapping: Option<Mapping>,
    address: u64,
    bytes: u64,
}

impl Imported {
    fn new(mapping: Mapping) -> Imported {
        Imported {
            address: mapping.address,
            bytes: mapping.bytes,
            mapping: Some(mapping),
        }
    }

    /// Where it starts here.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The memory in it that a handle is of; `None` where that lies beyond its end, as no handle says that
    /// came as it was made.
    pub fn part(&self, handle: &Handle) -> Option<BlockInfo> {
        let Handle { offset, size, .. } = *handle;
        let end = offset.checked_add(size)?;
        (end <= self.bytes).then_some(BlockInfo {
            start: self.address.checked_add(offset)?,
            size,
            requested: size,
            stream: UNORDERED,
        })
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        if lifecycle::in_forked_child() {
            return;
        }
        if let Some(mapping) = self.mapping.take() {
            take_down(mapping);
        }
        take_down_late();
    }
}

/// In a capture it is put off: a wait would end that.
fn take_down(mapping: Mapping) {
    let Mapping {
        device,
        address,
        bytes,
        kind,
    } = &mapping;
    if !device.may_wait() {
        LATE.lock().push(mapping);
        return;
    }
    // Where the work has failed, or the driver is gone, there is nothing to wait for.
    device.synchronize();
    match kind {
        Kind::Chunks { mapped } => device.unmap_shared(*address, *mapped, *bytes),
        Kind::Segment => device.close_segment(*address),
    }
}

fn take_down_late() {
    let late = std::mem::take(&mut *LATE.lock());
    late.into_iter().for_each(take_down);
}

/// Opens the span of a handle, in the context of a device of this process.
pub fn open(device: &'static Device, handle: &Handle) -> Result<Arc<Imported>, Unshared> {
    take_down_late();
    let (span, secret) = match exported::is_given(handle.number) {
        true => {
            let (answer, _) = ask(&handle.process, question(handle, Question::NO_FILES))?;
            (answer.span, Secret::NONE)
        }
        false => (handle.number, handle.secret),
    };
    let key = Key::Span(handle.process, span, secret, device.ordinal());
    once(key, || {
        let (first, files) = ask(&handle.process, question(handle, 0))?;
        if let Some(segment) = first.segment() {
            return segment_of(device, &segment);
        }
        let mut imported = Imported::new(Mapping {
            device,
            address: device.reserve_shared(first.bytes)?,
            bytes: first.bytes,
            kind: Kind::Chunks { mapped: 0 },
        });
        let mut at = map(&mut imported, &first.sizes, files)?;
        while at < first.parts {
            let (next, files) = ask(&handle.process, question(handle, at))?;
            let more = map(&mut imported, &next.sizes, files)?;
            if more == 0 {
                return Err(Unshared::Gone);
            }
            at += more;
        }
        device.open_shared(imported.address, first.bytes, first.home)?;
        Ok(imported)
    })
}

/// Opens a plain segment of another process by CUDA's own handle.
pub fn open_segment(
    device: &'static Device,
    handle: &SegmentHandle,
) -> Result<Arc<Imported>, Unshared> {
    take_down_late();
    let key = Key::Segment(*handle, device.ordinal());
    once(key, || segment_of(device, handle))
}

fn segment_of(device: &'static Device, handle: &SegmentHandle) -> Result<Imported, Unshared> {
    Ok(Imported::new(Mapping {
        device,
        address: device.open_segment(handle)?,
        bytes: u64::MAX,
        kind: Kind::Segment,
    }))
}

fn question(handle: &Handle, first: u64) -> Question {
    Question {
        number: handle.number,
        secret: handle.secret,
        first,
    }
}

/// What is open under the key, or else what `open` makes.
fn once(
    key: Key,
    open: impl FnOnce() -> Result<Imported, Unshared>,
) -> Result<Arc<Imported>, Unshared> {
    let mut all = OPEN.lock();
    let all = all.get_or_insert_default();
    if let Some(imported) = all.get(&key).and_then(Weak::upgrade) {
        return Ok(imported);
    }
    all.retain(|_, imported| imported.strong_count() > 0);
    let imported = Arc::new(open()?);
    all.insert(key, Arc::downgrade(&imported));
    Ok(imported)
}

/// Maps chunks behind those that are mapped; how many.
fn map(imported: &mut Imported, sizes: &[u64], files: Vec<OwnedFd>) -> Result<u64, Unshared> {
    let Some(Mapping {
        device,
        address,
        bytes,
        kind: Kind::Chunks { mapped },
    }) = &mut imported.mapping
    else {
        return Err(Unshared::Gone);
    };
    let count = files.len() as u64;
    for (size, file) in sizes.iter().zip(files) {
        if *size > *bytes - *mapped {
            return Err(Unshared::Gone);
        }
        device.map_shared(*address + *mapped, *size, &file)?;
        *mapped += size;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::sys::CUresult;
    use crate::ipc::Export;
    use crate::process::allocator::Allocator;
    use crate::settings::Settings;
    use concertina_sim::{Config, Machine};

    /// The uses of the driver's functions in a life of opened memory.
    const USES: [(&str, u64); 7] = [
        ("cuMemExportToShareableHandle", 3),
        ("cuMemAddressReserve", 1),
        ("cuMemImportFromShareableHandle", 3),
        ("cuMemMap", 3),
        ("cuMemRelease", 3),
        ("cuMemSetAccess", 1),
        ("cuMemUnmap", 1),
    ];

    /// Opens a block of three chunks as another process would, while these calls fail; nothing is left of it
    /// once it is closed and the device asked for something else.
    fn open_and_close(failures: &[(&str, u64)]) -> bool {
        let machine = Machine::new(Config::default());
        let _bound = machine.bind();
        let settings = Settings {
            chunk_size: 2 << 20,
            ..Settings::default()
        };
        let allocator = Allocator::new(concertina_sim::functions(), settings).expect("a device");
        let device: &'static Device = Box::leak(Box::new(allocator)).device(0).expect("a device");
        let block = device.allocate(6 << 20, 0).expect("memory");
        let shared = device.share(block).expect("a block");
        let before = (
            machine.used(0),
            machine.handles(),
            machine.mappings(),
            machine.reserved_addresses(),
        );
        for (name, nth) in failures {
            machine.fail(name, *nth, CUresult::CUDA_ERROR_UNKNOWN);
        }
        let imported = open_own(device, shared.span_number());
        let is_open = imported.is_ok();
        if let Ok(imported) = &imported {
            assert!(machine.mappings() >= before.2 + 3, "{failures:?}");
            assert_ne!(imported.address(), block);
        }
        drop(imported);
        machine.clear_failures();
        device.empty_cache();
        let after = (
            machine.used(0),
            machine.handles(),
            machine.mappings(),
            machine.reserved_addresses(),
        );
        assert_eq!(after, before, "{failures:?}");
        device.free(block, 0).expect("a block");
        device.empty_cache();
        assert_eq!((machine.used(0), machine.handles()), (0, 0));
        is_open
    }

    fn open_own(device: &'static Device, span: u64) -> Result<Imported, Unshared> {
        let (span, export) = device.export(span, None, 0, 16).ok_or(Unshared::Gone)?;
        let Export::Chunks(files) = export else {
            return Err(Unshared::Gone);
        };
        let sizes: Vec<u64> = span.parts.iter().map(|(_, size)| *size).collect();
        let bytes = sizes.iter().sum();
        let mut imported = Imported::new(Mapping {
            device,
            address: device.reserve_shared(bytes)?,
            bytes,
            kind: Kind::Chunks { mapped: 0 },
        });
        assert_eq!(map(&mut imported, &sizes, files)?, 3);
        device.open_shared(imported.address, bytes, [0; 16])?;
        Ok(imported)
    }

    #[test]
    fn opened_memory_survives_any_failing_call() {
        assert!(open_and_close(&[]));
        let closing = [("cuMemUnmap", 1), ("cuMemAddressFree", 1)];
        for (name, uses) in USES.into_iter().chain([("cuMemAddressFree", 1)]) {
            for nth in 1..=uses {
                open_and_close(&[(name, nth)]);
                for close in closing.into_iter().filter(|it| it.0 != name) {
                    open_and_close(&[(name, nth), close]);
                }
            }
        }
    }
}
