//! Memory that a program creates and maps itself: `cuMemCreate`, `cuMemAddressReserve`, `cuMemMap` and what
//! belongs to them. Newer releases of XLA do so for each array.
//!
//! The driver takes some 100 µs to put such a piece up and to take it down again (H100). So a piece that is
//! one handle, mapped whole at addresses reserved for it, is left up when the program takes it down, and the
//! next request for the same gets it, handle, address, mapping and all. The driver's own unmapping fails a
//! kernel that still uses the memory (H100), and other drivers may wait for it; here the device is waited for,
//! which it hardly ever has to be.
//!
//! The program takes a piece down in three calls: unmap, release, give the addresses back. Until the third it is
//! not known whether it is to be kept: a program may release memory to have less of it, and map other memory at
//! the addresses later. So a program has to be seen once to give addresses back right after the handle, before
//! a release is put off, and where the thread goes on with another call to the driver's memory, or anybody asks
//! about the piece, it is taken down in earnest. All else that can be done with handles and addresses is the
//! driver's, and a piece that it is done to, or whose memory others have been given, is none of ours any more.

use super::breaks::is_broken;
use super::malloc::{INVALID_VALUE, OUT_OF_MEMORY};
use super::{Answer, driver_table, primary_context, program_calls, retry_oom, stream_capture};
use concertina_engine::device::external_cache::{self, Keeper, LOOKS};
use concertina_engine::device::thread_number;
use concertina_engine::process::allocator::allocator_in_use;
use concertina_engine::process::startup;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_uint, c_ulonglong};
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// `CUmemAllocationProp` of `cuda.h`: type, handle types, the kind and number of the place, a pointer that is
/// null but for Windows, flags.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    unused: u64,
    flags: [u8; 8],
}

/// `CUmemLocation`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Access {
    location: Location,
    flags: c_uint,
}

/// `CU_MEM_ALLOCATION_TYPE_PINNED` and `CU_MEM_LOCATION_TYPE_DEVICE`.
const PINNED: c_int = 1;
const DEVICE: c_int = 1;

/// Bytes kept at most, on all devices together, and pieces.
const MOST_BYTES: usize = 1 << 30;
const MOST_PIECES: usize = 512;

/// Larger pieces are not kept: to write 256 MiB once takes as long as to put them up (H100, 3 TB/s).
const LARGEST: usize = 256 << 20;

/// Pieces that `tend` takes down at once, at most: some milliseconds.
const AT_ONCE: usize = 32;

/// What the driver was asked for: two pieces of the same kind are as good as each other.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    size: usize,
    properties: Properties,
}

impl Kind {
    /// Whether a piece of it can be kept.
    fn is_plain(&self) -> bool {
        let Properties {
            kind,
            location,
            unused,
            ..
        } = self.properties;
        kind == PINNED && location.kind == DEVICE && unused == 0 && self.size <= LARGEST
    }
}

/// What the program thinks of a piece. To the driver it is mapped in all of them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It is.
    Mapped,
    /// The program has its handle and its addresses.
    Unmapped,
    /// It has only the addresses. This thread gave the handle back, and has done nothing since.
    Released(u64),
    /// It has neither, since so many looks.
    Kept(u32),
    /// This thread has been given the handle, and is to reserve addresses next.
    Created(u64),
}

struct Piece {
    kind: Kind,
    handle: u64,
    /// How often the program has to release the handle.
    holds: u32,
    /// Who has been given access.
    access: Vec<Access>,
    stage: Stage,
}

#[derive(Default)]
struct Pieces {
    /// Handles that are mapped nowhere yet.
    created: HashMap<u64, Kind>,
    /// Reserved addresses at which nothing is mapped yet, and their sizes.
    reserved: HashMap<u64, usize>,
    /// By address.
    all: BTreeMap<u64, Piece>,
    /// Each handle's address.
    places: HashMap<u64, u64>,
    /// Addresses and sizes of those that are `Released`, `Created` and `Kept`, the oldest first.
    released: Vec<(u64, usize)>,
    recreated: Vec<(u64, usize)>,
    kept: Vec<(u64, usize)>,
    /// Bytes of the last.
    bytes: usize,
    /// Pieces that are not mapped to the program.
    hidden: usize,
    looks: u32,
    /// The program gives addresses back right after the handle.
    orderly: bool,
    /// The thread that gave a handle back last, and where it was mapped.
    last: Option<(u64, u64)>,
}

static PIECES: Mutex<Option<Pieces>> = Mutex::new(None);
/// How many of them are not mapped to the program.
static HIDDEN: AtomicUsize = AtomicUsize::new(0);

/// Works with all pieces. The driver is called meanwhile, by functions that do not wait for the GPU (H100), and
/// nothing else is waited for.
fn with<T>(work: impl FnOnce(&mut Pieces) -> T) -> T {
    let mut pieces = PIECES.lock().unwrap_or_else(PoisonError::into_inner);
    let pieces = pieces.get_or_insert_default();
    let result = work(pieces);
    HIDDEN.store(pieces.hidden, Relaxed);
    external_cache::note_bytes(pieces.bytes as u64);
    result
}

/// What the program believes to be done long since: if the driver refuses it once, it is asked again.
fn insist(call: impl Fn() -> u32) {
    if call() != 0 {
        call();
    }
}

impl Pieces {
    /// A kept piece of this kind, the one kept last; its handle. The calling thread is to reserve addresses for
    /// it next.
    fn take(&mut self, kind: Kind) -> Option<u64> {
        let mut newest_first = self.kept.iter().rev();
        let alike = |it: &&(u64, usize)| it.1 == kind.size && self.all[&it.0].kind == kind;
        let (address, _) = *newest_first.find(alike)?;
        external_cache::note_served();
        self.turn(address, Stage::Created(thread_number()));
        Some(self.all[&address].handle)
    }

    /// The driver was asked for a handle, and answered with `status`.
    fn created(&mut self, kind: Option<Kind>, handle: *const u64, status: u32) -> u32 {
        if let Some(kind) = kind.filter(|_| status == 0) {
            // SAFETY: the program's place for the handle, where the driver wrote it.
            self.created.insert(unsafe { *handle }, kind);
        }
        status
    }

    /// The piece that the calling thread has been given the handle of, and that addresses of this size and
    /// alignment are reserved for.
    fn recreated_here(&self, size: usize, alignment: usize) -> Option<u64> {
        let (thread, alignment) = (thread_number(), alignment.max(1));
        let own = |address| self.all[&address].stage == Stage::Created(thread);
        let aligned = |address| alignment.is_power_of_two() && address % alignment as u64 == 0;
        let mut of_size = self.recreated.iter().rev().filter(|it| it.1 == size);
        let fits = |it: &&(u64, usize)| aligned(it.0) && own(it.0);
        of_size.find(fits).map(|it| it.0)
    }

    /// The piece around an address.
    fn around(&self, address: u64) -> Option<u64> {
        let (start, piece) = self.all.range(..=address).next_back()?;
        (address - start < piece.kind.size as u64).then_some(*start)
    }

    /// What is done to the handle is the driver's business.
    fn expose(&mut self, handle: u64) {
        if let Some(address) = self.places.get(&handle).copied() {
            self.dissolve(address);
        }
    }

    /// The piece with just these addresses, if it is in this stage.
    fn exactly(&self, address: u64, size: usize, stage: Stage) -> Option<&Piece> {
        let piece = self.all.get(&address)?;
        (piece.kind.size == size && piece.stage == stage).then_some(piece)
    }

    /// From now on the program thinks so of the piece.
    fn turn(&mut self, address: u64, stage: Stage) {
        let Some(piece) = self.all.get_mut(&address) else {
            return;
        };
        let (before, size) = (std::mem::replace(&mut piece.stage, stage), piece.kind.size);
        self.leave(address, before, size);
        self.hidden += usize::from(stage != Stage::Mapped);
        match stage {
            Stage::Released(_) => self.released.push((address, size)),
            Stage::Created(_) => self.recreated.push((address, size)),
            Stage::Kept(_) => {
                self.kept.push((address, size));
                self.bytes += size;
            }
            Stage::Mapped | Stage::Unmapped => {}
        }
    }

    /// A piece of so many bytes is not in this stage any more.
    fn leave(&mut self, address: u64, stage: Stage, size: usize) {
        self.hidden -= usize::from(stage != Stage::Mapped);
        let list = match stage {
            Stage::Released(_) => &mut self.released,
            Stage::Created(_) => &mut self.recreated,
            Stage::Kept(_) => {
                self.bytes -= size;
                &mut self.kept
            }
            Stage::Mapped | Stage::Unmapped => return,
        };
        list.retain(|it| it.0 != address);
    }

    /// Makes the driver see a piece as the program does, and forgets it.
    fn dissolve(&mut self, address: u64) {
        let Some(piece) = self.all.remove(&address) else {
            return;
        };
        let (handle, kind) = (piece.handle, piece.kind);
        self.places.remove(&handle);
        self.leave(address, piece.stage, kind.size);
        if piece.stage == Stage::Mapped {
            return;
        }
        insist(|| driver_table::call!(cuMemUnmap(address, kind.size)));
        match piece.stage {
            Stage::Released(_) | Stage::Kept(_) => {
                insist(|| driver_table::call!(cuMemRelease(handle)))
            }
            _ if piece.holds == 1 => _ = self.created.insert(handle, kind),
            _ => {}
        }
        match piece.stage {
            Stage::Created(_) | Stage::Kept(_) => {
                insist(|| driver_table::call!(cuMemAddressFree(address, kind.size)));
            }
            _ => _ = self.reserved.insert(address, kind.size),
        }
    }

    /// The same of all that have any of these addresses.
    fn dissolve_around(&mut self, address: u64, size: usize) {
        let end = address.saturating_add(size.max(1) as u64);
        let first = self.around(address).unwrap_or(address);
        let touched: Vec<u64> = self.all.range(first..end).map(|(it, _)| *it).collect();
        touched.into_iter().for_each(|it| self.dissolve(it));
    }

    /// The calling thread does something else than to give the addresses back.
    fn settle(&mut self) {
        if !self.released.is_empty() {
            let thread = thread_number();
            self.settle_of(|by| by == thread);
        }
    }

    /// The same of the threads that are meant.
    fn settle_of(&mut self, is_meant: impl Fn(u64) -> bool) {
        if is_broken("kept released") {
            return;
        }
        for (address, _) in self.released.clone() {
            if matches!(self.all[&address].stage, Stage::Released(by) if is_meant(by)) {
                self.orderly = false;
                self.dissolve(address);
            }
        }
    }

    /// Keeps a piece of which the program has nothing any more, and no more of others than may be.
    fn keep(&mut self, address: u64) {
        self.turn(address, Stage::Kept(self.looks));
        if is_broken("kept") {
            self.give_back();
        }
        while self.bytes > MOST_BYTES || self.kept.len() > MOST_PIECES {
            self.dissolve(self.kept[0].0);
        }
    }

    /// What is kept goes back to the driver. False where there was nothing.
    fn give_back(&mut self) -> bool {
        let before = self.hidden;
        self.settle_of(|_| true);
        for (address, _) in self.kept.clone() {
            self.dissolve(address);
        }
        self.hidden < before
    }
}

/// See [`Keeper`].
pub fn give_back() -> bool {
    if HIDDEN.load(Relaxed) == 0 || is_broken("kept back") {
        return false;
    }
    let _inside = program_calls::enter();
    with(Pieces::give_back)
}

/// See [`Keeper`].
fn tend() {
    if HIDDEN.load(Relaxed) == 0 {
        return;
    }
    let _inside = program_calls::enter();
    with(|pieces| {
        pieces.looks += 1;
        let looks = pieces.looks;
        pieces.settle_of(|_| true);
        let is_idle = |address| matches!(pieces.all[&address].stage, Stage::Kept(since) if looks - since >= LOOKS);
        let kept = pieces.kept.iter().map(|it| it.0);
        let idle: Vec<u64> = kept.filter(|it| is_idle(*it)).take(AT_ONCE).collect();
        idle.into_iter().for_each(|it| pieces.dissolve(it));
    });
}

/// What has to be there before anything is kept: a child that is forked has to know itself, and with the pool
/// comes the thread that gives idle memory back, if that is wanted.
fn prepare() {
    static READY: AtomicBool = AtomicBool::new(false);
    if !READY.load(Relaxed) {
        startup::initialize();
        external_cache::announce(Keeper { give_back, tend });
        READY.store(primary_context::device().is_some(), Relaxed);
    }
}

/// `cuMemCreate`.
pub fn create(
    handle: *mut u64,
    size: usize,
    properties: *const Properties,
    flags: c_ulonglong,
) -> Answer {
    if handle.is_null() || properties.is_null() {
        return None;
    }
    // SAFETY: the program's properties, which the driver would read now.
    let asked = unsafe { *properties };
    let make = || driver_table::call!(cuMemCreate(handle, size, properties, flags));
    let kind = Kind {
        size,
        properties: asked,
    };
    let kind = (flags == 0 && kind.is_plain()).then_some(kind);
    if kind.is_some() {
        prepare();
    }
    let mut status = with(|pieces| {
        pieces.settle();
        match kind.and_then(|kind| pieces.take(kind)) {
            Some(kept) => {
                // SAFETY: the program's place for the handle, which is not null.
                unsafe { *handle = kept };
                0
            }
            None => pieces.created(kind, handle, make()),
        }
    });
    if status == OUT_OF_MEMORY {
        let ask = || with(|pieces| pieces.created(kind, handle, make()));
        let place = Some(asked.location).filter(|it| it.kind == DEVICE);
        let device = place.and_then(|it| allocator_in_use()?.device_in_use(it.id));
        if let Some(device) = device {
            status = retry_oom::again(device, status, ask);
        }
    }
    Some(status)
}

/// `cuMemAddressReserve`.
pub fn reserve(
    address: *mut u64,
    size: usize,
    alignment: usize,
    wanted: u64,
    flags: c_ulonglong,
) -> Answer {
    if address.is_null() {
        return None;
    }
    let anywhere = wanted == 0 && flags == 0 && size <= LARGEST;
    let status = with(|pieces| {
        pieces.settle();
        if wanted != 0 && !is_broken("kept wanted") {
            pieces.dissolve_around(wanted, size);
        }
        let again = pieces.recreated_here(size, alignment).filter(|_| anywhere);
        if let Some(again) = again {
            pieces.turn(again, Stage::Unmapped);
            // SAFETY: the program's place for the address, which is not null.
            unsafe { *address = again };
            return 0;
        }
        let status =
            driver_table::call!(cuMemAddressReserve(address, size, alignment, wanted, flags));
        if status == 0 && anywhere {
            // SAFETY: written just now.
            pieces.reserved.insert(unsafe { *address }, size);
        }
        status
    });
    Some(status)
}

/// `cuMemMap`.
pub fn map(address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong) -> Answer {
    let whole = offset == 0 && flags == 0;
    let status = with(|pieces| {
        pieces.settle();
        let again = pieces.exactly(address, size, Stage::Unmapped);
        if again.is_some_and(|piece| whole && piece.handle == handle) {
            pieces.turn(address, Stage::Mapped);
            return 0;
        }
        pieces.expose(handle);
        pieces.dissolve_around(address, size);
        let status = driver_table::call!(cuMemMap(address, size, offset, handle, flags));
        if status != 0 {
            return status;
        }
        let kind = pieces.created.remove(&handle);
        let reserved = pieces.reserved.remove(&address) == Some(size);
        if let Some(kind) = kind.filter(|kind| whole && reserved && kind.size == size) {
            pieces.places.insert(handle, address);
            let piece = Piece {
                kind,
                handle,
                holds: 1,
                access: Vec::new(),
                stage: Stage::Mapped,
            };
            pieces.all.insert(address, piece);
        }
        status
    });
    Some(status)
}

/// `cuMemSetAccess`.
pub fn set_access(address: u64, size: usize, access: *const Access, count: usize) -> Answer {
    if access.is_null() || count == 0 {
        return None;
    }
    // SAFETY: the program's list, which the driver would read now.
    let wanted = unsafe { slice::from_raw_parts(access, count) };
    let status = with(|pieces| {
        pieces.settle();
        let set = || driver_table::call!(cuMemSetAccess(address, size, access, count));
        let piece = pieces.all.get_mut(&address);
        let whole = |it: &&mut Piece| it.kind.size == size && it.stage == Stage::Mapped;
        let Some(piece) = piece.filter(whole) else {
            pieces.dissolve_around(address, size);
            return set();
        };
        if wanted.iter().all(|it| piece.access.contains(it)) {
            return 0;
        }
        let status = set();
        for right in wanted {
            piece.access.retain(|it| it.location != right.location);
            if status == 0 {
                piece.access.push(*right);
            }
        }
        status
    });
    Some(status)
}

/// Waits for a device that has access to a piece. False where its work has failed, or it is none that can be
/// waited for.
fn is_idle(place: Location) -> bool {
    match primary_context::pool_of(place.id) {
        _ if place.kind != DEVICE => false,
        Some(device) => device.synchronize() == 0,
        None => !primary_context::is_active(place.id),
    }
}

/// `cuMemUnmap`.
pub fn unmap(address: u64, size: usize) -> Answer {
    let users = with(|pieces| {
        pieces.settle();
        let piece = pieces.exactly(address, size, Stage::Mapped);
        piece.map(|piece| piece.access.clone())
    });
    // Waited for without the lock. What failed before is the driver's to say.
    let are_idle = |users: Vec<Access>| users.iter().all(|it| is_idle(it.location));
    let idle = !stream_capture::is_on() && users.is_some_and(are_idle);
    with(|pieces| {
        if idle && pieces.exactly(address, size, Stage::Mapped).is_some() {
            pieces.turn(address, Stage::Unmapped);
            return Some(0);
        }
        pieces.dissolve_around(address, size);
        None
    })
}

/// `cuMemRelease`.
pub fn release(handle: u64) -> Answer {
    with(|pieces| {
        pieces.settle();
        let Some(address) = pieces.places.get(&handle).copied() else {
            pieces.created.remove(&handle);
            return None;
        };
        let piece = pieces.all.get_mut(&address)?;
        match piece.stage {
            Stage::Mapped | Stage::Unmapped if piece.holds > 1 => {
                let status = driver_table::call!(cuMemRelease(handle));
                piece.holds -= u32::from(status == 0);
                Some(status)
            }
            Stage::Mapped => {
                // The mapping alone holds the memory from now on, and nothing will name it again.
                pieces.dissolve(address);
                None
            }
            Stage::Unmapped => {
                let thread = thread_number();
                pieces.last = Some((thread, address));
                if pieces.orderly {
                    pieces.turn(address, Stage::Released(thread));
                    return Some(0);
                }
                pieces.dissolve(address);
                pieces.created.remove(&handle);
                None
            }
            Stage::Created(_) => {
                pieces.keep(address);
                Some(0)
            }
            Stage::Released(_) | Stage::Kept(_) => Some(INVALID_VALUE),
        }
    })
}

/// `cuMemAddressFree`.
pub fn free_addresses(address: u64, size: usize) -> Answer {
    with(|pieces| {
        pieces.orderly |= pieces.last.take() == Some((thread_number(), address));
        let piece = pieces.all.get(&address);
        match piece.map(|piece| (piece.stage, piece.kind.size)) {
            Some((Stage::Released(_), whole)) if whole == size => {
                pieces.keep(address);
                pieces.settle();
                return Some(0);
            }
            Some((Stage::Created(_) | Stage::Kept(_), _)) => return Some(INVALID_VALUE),
            _ => {}
        }
        pieces.settle();
        pieces.dissolve_around(address, size);
        pieces.reserved.remove(&address);
        None
    })
}

/// `cuMemRetainAllocationHandle`, of memory that is none of the pool's.
pub fn retain(handle: *mut u64, address: u64) -> Answer {
    if handle.is_null() {
        return None;
    }
    with(|pieces| {
        pieces.settle();
        let at = pieces.around(address)?;
        if pieces.all[&at].stage != Stage::Mapped {
            pieces.dissolve(at);
            return None;
        }
        let status = driver_table::call!(cuMemRetainAllocationHandle(handle, address));
        let piece = pieces.all.get_mut(&at)?;
        // SAFETY: the program's place for the handle, written where the call succeeded.
        if status == 0 && unsafe { *handle } == piece.handle {
            piece.holds += 1;
        } else if status == 0 {
            pieces.dissolve(at);
        }
        Some(status)
    })
}

/// Something is done to the handle that makes its memory another's, too.
pub fn expose(handle: u64) -> Answer {
    if !is_broken("kept shared") {
        with(|pieces| {
            pieces.settle();
            pieces.expose(handle);
            pieces.created.remove(&handle);
        });
    }
    None
}

/// The same to the memory at these addresses.
pub fn expose_at(address: u64, size: usize) -> Answer {
    with(|pieces| {
        pieces.settle();
        pieces.dissolve_around(address, size);
    });
    None
}

/// The same to handles that are named in a way which is not followed here.
pub fn expose_all() -> Answer {
    forget_all();
    None
}

/// Nothing is known any more of what there is: a context ends.
pub fn forget_all() {
    with(|pieces| {
        pieces.dissolve_around(0, usize::MAX);
        pieces.created.clear();
        pieces.reserved.clear();
    });
}

/// A question about an address: what the program has unmapped is not there. One relaxed load where nothing is
/// kept.
#[inline]
pub fn ask(address: u64) {
    if HIDDEN.load(Relaxed) > 0 && !is_broken("kept asked") {
        look_at(address);
    }
}

/// The same, of a question that the driver answers then.
pub fn ask_first(address: u64) -> Answer {
    ask(address);
    None
}

#[cold]
fn look_at(address: u64) {
    with(|pieces| {
        let at = pieces.around(address);
        if let Some(at) = at.filter(|it| pieces.all[it].stage != Stage::Mapped) {
            pieces.dissolve(at);
        }
    });
}

/// Bytes of the current device that are kept, and that the program can have. What it may only be about to take
/// down is taken down.
pub fn bytes_kept() -> u64 {
    let mut device = -1;
    if HIDDEN.load(Relaxed) == 0 || driver_table::ask!(cuCtxGetDevice(&mut device)) != 0 {
        return 0;
    }
    with(|pieces| {
        pieces.settle_of(|_| true);
        let kinds = pieces.kept.iter().map(|it| pieces.all[&it.0].kind);
        let here = kinds.filter(|kind| kind.properties.location.id == device);
        here.map(|kind| kind.size as u64).sum()
    })
}
