//! A program's allocations, uses and frees as a list of events.

use crate::random::Random;

/// The unit in which live bytes are counted.
const UNIT: u64 = 512;

/// A block of a script; blocks count up from 0.
pub type Block = u32;

#[derive(Clone, Copy)]
pub enum Event {
    /// Takes this many bytes on a stream.
    Take(Block, u64, u16),
    /// Another stream uses the block.
    Use(Block, u16),
    Give(Block),
}

/// What a program does, from an empty pool to its end, where nothing is live.
#[derive(Default)]
pub struct Script {
    pub events: Vec<Event>,
    /// By block: its bytes, 0 once it is freed.
    sizes: Vec<u64>,
    pub live: u64,
    pub peak_live: u64,
    /// Streams are numbered from 0, the default one, to below this.
    pub streams: u16,
}

impl Script {
    pub fn take(&mut self, bytes: u64, stream: u16) -> Block {
        let block = self.sizes.len() as Block;
        self.events.push(Event::Take(block, bytes, stream));
        self.sizes.push(bytes);
        self.live += bytes.next_multiple_of(UNIT);
        self.peak_live = self.peak_live.max(self.live);
        self.streams = self.streams.max(stream + 1);
        block
    }

    pub fn used_by(&mut self, block: Block, stream: u16) {
        self.events.push(Event::Use(block, stream));
        self.streams = self.streams.max(stream + 1);
    }

    pub fn give(&mut self, block: Block) {
        self.events.push(Event::Give(block));
        self.live -= std::mem::take(&mut self.sizes[block as usize]).next_multiple_of(UNIT);
    }

    pub fn give_all(&mut self, blocks: impl IntoIterator<Item = Block>) {
        blocks.into_iter().for_each(|block| self.give(block));
    }

    /// Memory that is only needed for the moment.
    pub fn scratch(&mut self, bytes: u64, stream: u16) {
        let block = self.take(bytes, stream);
        self.give(block);
    }

    /// How many blocks there are in all.
    pub fn blocks(&self) -> usize {
        self.sizes.len()
    }

    /// Two programs in one process, the second on streams `shift` further on. What each of them does
    /// next comes at random, as often as it has events.
    pub fn beside(self, other: Script, shift: u16, random: &mut Random) -> Script {
        let mut both = Script::default();
        let mut sides = [(self, 0), (other, shift)].map(|(script, shift)| {
            let names = vec![0; script.blocks()];
            (script.events.into_iter(), names, shift)
        });
        loop {
            let [first, second] = [0, 1].map(|side: usize| sides[side].0.len() as u64);
            if first + second == 0 {
                return both;
            }
            let side = usize::from(random.below(first + second) >= first);
            let (events, names, shift) = &mut sides[side];
            match events.next() {
                Some(Event::Take(block, bytes, stream)) => {
                    names[block as usize] = both.take(bytes, stream + *shift);
                }
                Some(Event::Use(block, stream)) => {
                    both.used_by(names[block as usize], stream + *shift);
                }
                Some(Event::Give(block)) => both.give(names[block as usize]),
                None => {}
            }
        }
    }
}
