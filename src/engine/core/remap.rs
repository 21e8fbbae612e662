//! Remapping: whole free chunks are mapped again where a request needs one contiguous range.
//!
//! Nothing waits: the new mapping is there at once, and the old one, *stale*, is unmapped later, once the
//! work that used it has completed.

use super::block::{BlockId, BlockState, NONE};
use super::chunk::{Chunk, ChunkId, StaleMapping};
use super::coalesce::merged_owner;
use super::gpu::{Gpu, Refusal};
use super::ids::SHARED_ARENA;
use super::memory_events::MemoryEvent;
use super::pool::Pool;

/// How many stale mappings are kept, for each chunk and at least. They cost addresses, of which eight times
/// the device's memory is reserved at once; with this many llama_serve, from an empty pool, takes a fifth
/// less of the driver's time than with half a mapping a chunk.
const STALE_PER_CHUNK: usize = 4;
const MIN_STALE: usize = 256;

impl<G: Gpu> Pool<G> {
    /// Chooses whole free chunks to remap, `wanted` bytes or more if there are as many, none of the free
    /// block `except`. Those that the stream may use come first, then other streams', behind a wait on the
    /// GPU (none for the idle list). The smallest free blocks give theirs first: large ones can meet large
    /// requests as they are. Returns the bytes chosen.
    pub(super) fn choose_chunks(&mut self, wanted: u64, list: u16, except: BlockId) -> u64 {
        let mut chosen = std::mem::take(&mut self.to_remap);
        chosen.clear();
        let mut bytes = 0;
        let own = self.lists.get(list);
        let chunks = &self.arenas[own.arena as usize].chunks;
        // A captured graph goes on using the addresses of its private arena: nothing is remapped there.
        let wanted = if own.arena == SHARED_ARENA { wanted } else { 0 };
        let (idle, arena) = (own.idle, own.arena);
        let own = [Some(list), Some(idle).filter(|idle| *idle != list)];
        let others = self.lists.others_with_free(list).filter(|_| list != idle);
        let mut owned = 0;
        let mut sources: Vec<(u16, u64)> = Vec::new();
        'search: for source in own.into_iter().flatten().chain(others.map(|(at, _)| at)) {
            let bins = &self.lists.get(source).bins;
            for id in bins.ascending(&self.blocks, self.granularity) {
                if bytes >= wanted {
                    break 'search;
                }
                if id == except {
                    continue;
                }
                let free_block = &self.blocks[id];
                for chunk in chunks.within(free_block.address, free_block.end()) {
                    if bytes >= wanted {
                        break 'search;
                    }
                    let Chunk { address, size, .. } = *chunks.get(chunk);
                    if source == list || source == idle {
                        owned = chosen.len() + 1;
                    } else {
                        let Some(epoch) = self.reusable_after(id, (address, address + size), list)
                        else {
                            continue;
                        };
                        match sources.iter_mut().find(|(at, _)| *at == source) {
                            Some((_, until)) => *until = epoch.max(*until),
                            None => sources.push((source, epoch)),
                        }
                    }
                    bytes += size;
                    chosen.push((id, chunk));
                }
            }
        }
        if !sources
            .iter()
            .all(|(other, until)| self.wait_for(list, *other, *until))
        {
            chosen.truncate(owned);
            let chunks = &self.arenas[arena as usize].chunks;
            bytes = chosen.iter().map(|(_, it)| chunks.get(*it).size).sum();
        }
        self.to_remap = chosen;
        bytes
    }

    /// Remaps the chosen chunks to the cursor, and unmaps stale mappings if there are too many.
    pub(super) fn remap_chosen(&mut self, list: u16) -> Result<(), Refusal> {
        let id = self.lists.get(list).arena;
        let began = self.gpu.now();
        let chosen = std::mem::take(&mut self.to_remap);
        let mut result = Ok(());
        for (free_block, chunk) in &chosen {
            result = self.remap_chunk(*free_block, *chunk, list);
            if result.is_err() {
                break;
            }
        }
        if !chosen.is_empty() {
            self.cover_stale(id);
            let bound = (self.arenas[id as usize].chunks.len() * STALE_PER_CHUNK).max(MIN_STALE);
            self.unmap_stale(bound, id);
            self.remap_budget.spend(self.gpu.now() - began);
        }
        self.to_remap = chosen;
        result
    }

    /// Remaps one chunk of a free block to the cursor. Does nothing where there are no addresses.
    fn remap_chunk(&mut self, free_block: BlockId, id: ChunkId, list: u16) -> Result<(), Refusal> {
        let Self {
            arenas,
            blocks,
            lists,
            gpu,
            counters,
            event_log,
            ..
        } = self;
        let arena_id = lists.get(list).arena;
        let arena = &mut arenas[arena_id as usize];
        let chunk = *arena.chunks.get(id);
        if arena.addresses.gap_at(arena.cursor) < chunk.size {
            return Ok(());
        }
        if let Err(refusal) = gpu.map(arena.cursor, chunk.size, chunk.handle) {
            arena.abandon(chunk.size);
            return Err(refusal);
        }
        let (owner, until) = (blocks[free_block].list, blocks[free_block].detail);
        let at = arena.cursor;
        arena.addresses.mark_mapped(at, chunk.size);
        arena.chunks.set_address(id, arena.cursor);
        event_log.push(MemoryEvent::SegmentUnmapped(chunk.address, chunk.size));
        event_log.push(MemoryEvent::SegmentMapped(arena.cursor, chunk.size));
        arena.chunks.get_mut(id).stale += 1;
        arena.chunks.stale.push_back(StaleMapping {
            chunk: id,
            address: chunk.address,
            stream: lists.get(owner).key,
            until: if owner == arena.idle { 0 } else { until },
        });
        counters.stitches += 1;
        counters.stitched_bytes += chunk.size;
        counters.stale += 1;
        counters.stale_bytes += chunk.size;
        let idle = arena.idle;
        self.remove_range(free_block, chunk.address, chunk.size);
        let (owner, epoch) = match owner == idle || owner == list {
            true => {
                let range = (chunk.address, chunk.address + chunk.size);
                let key = self.lists.get(owner).key;
                self.epochs.note_remapped(key, range, at);
                (owner, until)
            }
            // The stream waits for the one that it was, so that it is its own now.
            false => (list, self.new_free_epoch(list)),
        };
        self.append_free(chunk.size, owner, epoch, list);
        Ok(())
    }

    /// Removes `size` bytes at `address` from a free block; what is left on either side stays free. The node
    /// becomes the right-hand rest, so that chunks of one free block can be removed in ascending order.
    pub(super) fn remove_range(&mut self, free_block: BlockId, address: u64, size: u64) {
        let Self {
            blocks,
            lists,
            counters,
            arenas,
            ..
        } = self;
        let free = blocks[free_block];
        let owner = lists.get_mut(free.list);
        let arena = &mut arenas[owner.arena as usize];
        owner.remove(blocks, free_block);
        counters.free_block_removed(free.size);
        let (left, right) = (address - free.address, free.end() - (address + size));
        let mut before = free.prev;
        if left > 0 {
            before = blocks.add(free.address, left, free.list, BlockState::Free);
            blocks[before].prev = free.prev;
            blocks[before].detail = free.detail;
            if free.prev != NONE {
                blocks[free.prev].next = before;
            }
            owner.insert(blocks, before);
            counters.free_block_added(left);
        } else if before != NONE {
            blocks[before].next = NONE;
        }
        if right > 0 {
            let rest = &mut blocks[free_block];
            rest.address = address + size;
            rest.size = right;
            rest.prev = NONE;
            owner.insert(blocks, free_block);
            counters.free_block_added(right);
            return;
        }
        if free.next != NONE {
            blocks[free.next].prev = NONE;
        }
        blocks.remove(free_block);
        if arena.tail == free_block {
            // Growth goes on from where the run ends now.
            arena.tail = before;
            arena.cursor = address;
        }
    }

    /// Appends `size` free bytes, just mapped at the cursor, to the run: to the tail if the stream `list` may
    /// use that too, else as a new tail. They are `owner`'s, freed at `epoch`.
    pub(super) fn append_free(&mut self, size: u64, owner: u16, epoch: u64, list: u16) {
        let Self {
            blocks,
            lists,
            counters,
            arenas,
            ..
        } = self;
        let idle = lists.get(list).idle;
        let arena = &mut arenas[lists.get(list).arena as usize];
        let (address, tail) = (arena.cursor, arena.tail);
        arena.cursor += size;
        if tail != NONE && blocks[tail].state == BlockState::Free {
            let (other, detail) = (blocks[tail].list, blocks[tail].detail);
            if (other == list || other == idle)
                && let Some((owner, epoch)) = merged_owner((owner, epoch), (other, detail), idle)
            {
                lists.get_mut(other).remove(blocks, tail);
                let free_block = &mut blocks[tail];
                free_block.size += size;
                (free_block.list, free_block.detail) = (owner, epoch);
                counters.free_block_grown(size);
                lists.get_mut(owner).insert(blocks, tail);
                return;
            }
        }
        let id = blocks.add(address, size, owner, BlockState::Free);
        blocks[id].detail = epoch;
        blocks[id].prev = tail;
        if tail != NONE {
            blocks[tail].next = id;
        }
        arena.tail = id;
        counters.free_block_added(size);
        lists.get_mut(owner).insert(blocks, id);
    }
}
