//! Memory of other processes, mapped into this one. Each span is mapped once, and stays mapped as long as any
//! [`Imported`] of it is held.

use crate::core::{BlockInfo, UNORDERED};
use crate::device::Device;
use crate::device::exported;
use crate::device::spans::{IpcError, SegmentHandle};
use crate::ipc::client::request;
use crate::ipc::handle::Handle;
use crate::ipc::protocol::{Request, SEGMENT};
use crate::util::fork;
use crate::util::secret::Secret;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

/// What is imported and still held.
static IMPORTED: Mutex<Option<HashMap<Key, Weak<Imported>>>> = Mutex::new(None);

/// Mappings that nobody holds any more, but that could not be unmapped during a capture.
static DEFERRED: Mutex<Vec<Mapping>> = Mutex::new(Vec::new());

/// What an import is found by: the memory, and the device in whose context it is mapped.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    /// Process, span, secret, device. The secret is part of the key so that a number alone finds nothing; it
    /// is [`Secret::NONE`] if the number and secret of an allocation led to the span.
    Span([u8; 16], u64, Secret, i32),
    Segment(SegmentHandle, i32),
}

enum Kind {
    /// Chunks, mapped from the start of the reserved addresses on, for this many bytes.
    Chunks { mapped: u64 },
    /// A plain segment, opened by CUDA.
    Segment,
}

struct Mapping {
    device: &'static Device,
    address: u64,
    /// Bytes of reserved addresses; of a segment unknown, and `u64::MAX`.
    bytes: u64,
    kind: Kind,
}

/// Memory of another process. It stays mapped until this is dropped; dropping waits for the device, whose
/// work may still use the memory. In a forked child dropping does nothing: the mapping is the parent's.
pub struct Imported {
    /// Taken on drop.
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

    /// Its first address in this process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The memory in it that a handle names; `None` if it reaches beyond the end, which only a handle that
    /// was tampered with does.
    pub fn subrange(&self, handle: &Handle) -> Option<BlockInfo> {
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
        if fork::in_forked_child() {
            return;
        }
        if let Some(mapping) = self.mapping.take() {
            unmap(mapping);
        }
        unmap_deferred();
    }
}

/// Waits for the device and unmaps; deferred during a capture, which a wait would invalidate.
fn unmap(mapping: Mapping) {
    let Mapping {
        device,
        address,
        bytes,
        kind,
    } = &mapping;
    if !device.may_wait() {
        DEFERRED.lock().push(mapping);
        return;
    }
    // If the device has failed, or the driver has shut down, there is nothing to wait for.
    device.synchronize();
    match kind {
        Kind::Chunks { mapped } => device.unmap_imported(*address, *mapped, *bytes),
        Kind::Segment => device.close_segment(*address),
    }
}

fn unmap_deferred() {
    let deferred = std::mem::take(&mut *DEFERRED.lock());
    deferred.into_iter().for_each(unmap);
}

/// Maps the span of a handle in the context of a device of this process, or returns the mapping that there
/// is. Any thread may call it; it waits for the other process.
pub fn import(device: &'static Device, handle: &Handle) -> Result<Arc<Imported>, IpcError> {
    unmap_deferred();
    let (span, secret) = match exported::is_allocation(handle.number) {
        true => {
            let (response, _) = request(&handle.process, request_of(handle, Request::NO_FILES))?;
            (response.span, Secret::NONE)
        }
        false => (handle.number, handle.secret),
    };
    let key = Key::Span(handle.process, span, secret, device.ordinal());
    find_or_insert(key, || {
        let (first, files) = request(&handle.process, request_of(handle, 0))?;
        if first.kind == SEGMENT {
            return map_segment(device, &first.segment);
        }
        let mut imported = Imported::new(Mapping {
            device,
            address: device.reserve_imported(first.bytes)?,
            bytes: first.bytes,
            kind: Kind::Chunks { mapped: 0 },
        });
        let mut at = map_chunks(&mut imported, &first.sizes, files)?;
        while at < first.parts {
            let (next, files) = request(&handle.process, request_of(handle, at))?;
            let more = map_chunks(&mut imported, &next.sizes, files)?;
            if more == 0 {
                return Err(IpcError::Gone);
            }
            at += more;
        }
        device.grant_imported(imported.address, first.bytes, first.device)?;
        Ok(imported)
    })
}

/// [`import`] for a plain segment, by CUDA's own handle.
pub fn import_segment(
    device: &'static Device,
    handle: &SegmentHandle,
) -> Result<Arc<Imported>, IpcError> {
    unmap_deferred();
    let key = Key::Segment(*handle, device.ordinal());
    find_or_insert(key, || map_segment(device, handle))
}

fn map_segment(device: &'static Device, handle: &SegmentHandle) -> Result<Imported, IpcError> {
    Ok(Imported::new(Mapping {
        device,
        address: device.open_segment(handle)?,
        bytes: u64::MAX,
        kind: Kind::Segment,
    }))
}

fn request_of(handle: &Handle, first: u64) -> Request {
    Request {
        number: handle.number,
        secret: handle.secret,
        first,
    }
}

/// The import under this key; if there is none, the one that `open` makes.
fn find_or_insert(
    key: Key,
    open: impl FnOnce() -> Result<Imported, IpcError>,
) -> Result<Arc<Imported>, IpcError> {
    let mut all = IMPORTED.lock();
    let all = all.get_or_insert_default();
    if let Some(imported) = all.get(&key).and_then(Weak::upgrade) {
        return Ok(imported);
    }
    all.retain(|_, imported| imported.strong_count() > 0);
    let imported = Arc::new(open()?);
    all.insert(key, Arc::downgrade(&imported));
    Ok(imported)
}

/// Maps chunks behind those that are mapped. Returns how many.
fn map_chunks(
    imported: &mut Imported,
    sizes: &[u64],
    files: Vec<OwnedFd>,
) -> Result<u64, IpcError> {
    let Some(Mapping {
        device,
        address,
        bytes,
        kind: Kind::Chunks { mapped },
    }) = &mut imported.mapping
    else {
        return Err(IpcError::Gone);
    };
    let count = files.len() as u64;
    for (size, file) in sizes.iter().zip(files) {
        if *size > *bytes - *mapped {
            return Err(IpcError::Gone);
        }
        device.map_imported(*address + *mapped, *size, &file)?;
        *mapped += size;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::spans::Export;
    use crate::driver::sys::CUresult;
    use crate::settings::Settings;
    use concertina_sim::{Config, Machine};

    /// How often importing and unmapping call each of the driver's functions.
    const USES: [(&str, u64); 7] = [
        ("cuMemExportToShareableHandle", 3),
        ("cuMemAddressReserve", 1),
        ("cuMemImportFromShareableHandle", 3),
        ("cuMemMap", 3),
        ("cuMemRelease", 3),
        ("cuMemSetAccess", 1),
        ("cuMemUnmap", 1),
    ];

    /// Imports a block of three chunks as another process would, while these calls fail. Checks that nothing
    /// of it is left once it is dropped and the device's cache emptied; returns whether it could be imported.
    fn open_and_close(failures: &[(&str, u64)]) -> bool {
        let machine = Machine::new(Config::default());
        let _bound = machine.bind();
        let settings = Settings {
            chunk_size: 2 << 20,
            ..Settings::default()
        };
        let functions = concertina_sim::functions();
        // SAFETY: no precondition.
        assert_eq!(unsafe { (functions.cuInit)(0) }, 0);
        let device = Device::open(functions, 0, 1, &settings).expect("a device");
        let device: &'static Device = Box::leak(Box::new(device));
        let block = device.allocate(6 << 20, 0).expect("memory");
        let shared = device.ipc_block(block).expect("a block");
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

    fn open_own(device: &'static Device, span: u64) -> Result<Imported, IpcError> {
        let (span, export) = device.export(span, None, 0, 16).ok_or(IpcError::Gone)?;
        let Export::Chunks(files) = export else {
            return Err(IpcError::Gone);
        };
        let sizes: Vec<u64> = span.parts.iter().map(|(_, size)| *size).collect();
        let bytes = sizes.iter().sum();
        let mut imported = Imported::new(Mapping {
            device,
            address: device.reserve_imported(bytes)?,
            bytes,
            kind: Kind::Chunks { mapped: 0 },
        });
        assert_eq!(map_chunks(&mut imported, &sizes, files)?, 3);
        device.grant_imported(imported.address, bytes, [0; 16])?;
        Ok(imported)
    }

    #[test]
    fn imported_memory_leaks_nothing_whichever_call_fails() {
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
