//! Memory of other processes that the program has opened by `cudaIpcOpenMemHandle`.

use super::mutation;
use concertina_engine::core::BlockInfo;
use concertina_engine::device::Device;
use concertina_engine::ipc::{self, Handle, Imported, IpcError};
use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One opening of memory in the context of a device.
pub struct Open {
    handle: Handle,
    device: &'static Device,
    memory: Arc<Imported>,
    found: BlockInfo,
    /// How often it was opened and not closed.
    count: usize,
}

/// Openings, by the address that the program has.
static OPEN: Mutex<Option<HashMap<u64, Open>>> = Mutex::new(None);
/// Whether the program ever opened any.
static ANY: AtomicBool = AtomicBool::new(false);

fn all() -> MutexGuard<'static, Option<HashMap<u64, Open>>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The opened memory around an address. One relaxed load where the program never opened any.
pub fn around(address: u64) -> Option<(&'static Device, BlockInfo)> {
    if !ANY.load(Relaxed) {
        return None;
    }
    let all = all();
    let mut open = all.iter().flat_map(HashMap::values);
    let is_in = |it: &&Open| (it.found.start..it.found.start + it.found.size).contains(&address);
    open.find(is_in).map(|it| (it.device, it.found))
}

/// Opens it once more in the context of a device. Answers its address.
pub fn open(device: &'static Device, handle: &Handle) -> Result<u64, IpcError> {
    ANY.store(true, Relaxed);
    let mut all = all();
    let all = all.get_or_insert_default();
    // CUDA opens a handle once for each context, too.
    let known = |it: &&mut Open| it.handle == *handle && ptr::eq(it.device, device);
    if let Some(open) = all.values_mut().find(known) {
        open.count += 1;
        return Ok(open.found.start);
    }
    let memory = ipc::import(device, handle)?;
    let mut found = memory.subrange(handle).ok_or(IpcError::Gone)?;
    if mutation::is_on("ipc offset") {
        found.start = memory.address();
    }
    let open = Open {
        handle: *handle,
        device,
        memory,
        found,
        count: 1,
    };
    all.insert(found.start, open);
    Ok(found.start)
}

/// Closes memory once. Answers its device, and the opening itself if it was the last: the memory stays mapped until
/// that is dropped. `None` if nothing is open at the address.
pub fn close(address: u64) -> Option<(&'static Device, Option<Open>)> {
    if !ANY.load(Relaxed) {
        return None;
    }
    let mut all = all();
    let open = all.as_mut()?.get_mut(&address)?;
    let device = open.device;
    open.count -= 1;
    let unused = if open.count == 0 || mutation::is_on("ipc count") {
        all.as_mut()?.remove(&address)
    } else {
        None
    };
    Some((device, unused))
}

/// Closes all that is open in a device's context, which ends.
pub fn close_all(device: &Device) {
    if ANY.load(Relaxed) {
        let mut gone = Vec::new();
        if let Some(all) = all().as_mut() {
            gone.extend(all.extract_if(|_, it| ptr::eq(it.device, device)));
        }
        gone.into_iter().for_each(|(_, it)| drop(it.memory));
    }
}
