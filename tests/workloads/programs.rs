//! Generated programs: their allocations and frees. Sizes, lengths and orders follow from the seed.

use crate::random::Random;
use crate::script::{Block, Script};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Trains a transformer whose batches and lengths vary from step to step, and evaluates in between.
pub fn training(random: &mut Random) -> Script {
    let mut script = Script::default();
    let layers = random.between(4, 17);
    let width = 64 * random.between(4, 33);
    let words = 1000 * random.between(5, 60);
    // Weights, and the optimizer's state for each.
    let shapes: Vec<u64> = (0..layers)
        .flat_map(|_| [3 * width * width, width * width, 8 * width * width, width])
        .chain([words * width])
        .collect();
    let mut live: Vec<Block> = shapes
        .iter()
        .map(|shape| script.take(2 * shape, 0))
        .collect();
    let longest = (512 * MIB / (layers * width * 2)).clamp(64, 16384);
    for step in 0..random.between(12, 25) {
        let tokens = random.between(longest / 8, longest);
        let evaluates = random.once_in(6);
        let input = script.take(8 * tokens, 0);
        let mut activations = Vec::new();
        for _ in 0..layers {
            let stream = script.take(2 * tokens * width, 0);
            let wide = script.take(6 * tokens * width, 0);
            script.scratch(tokens * 256 + 512, 0);
            let inner = script.take(8 * tokens * width, 0);
            let out = script.take(2 * tokens * width, 0);
            let layer = [stream, wide, inner, out];
            if evaluates {
                script.give_all(layer);
            } else {
                activations.push(layer);
            }
        }
        // The loss goes over a part of the tokens at a time.
        let part = tokens.min(2048);
        let scores = script.take(4 * part * words, 0);
        script.scratch(4 * part * words, 0);
        script.give_all([scores, input]);
        if evaluates {
            continue;
        }
        let mut gradients = vec![script.take(2 * words * width, 0)];
        for (layer, activations) in activations.into_iter().enumerate().rev() {
            let back = script.take(8 * tokens * width, 0);
            let [stream, wide, inner, out] = activations;
            script.give_all([out, inner]);
            for shape in &shapes[4 * layer..4 * layer + 4] {
                gradients.push(script.take(2 * shape, 0));
            }
            script.give(back);
            script.scratch(6 * tokens * width, 0);
            script.give_all([wide, stream]);
        }
        if step == 0 {
            live.extend(
                shapes
                    .iter()
                    .flat_map(|shape| [4 * shape, 4 * shape])
                    .map(|bytes| script.take(bytes, 0)),
            );
        }
        for shape in &shapes {
            script.scratch(4 * shape, 0);
        }
        script.give_all(gradients);
    }
    script.give_all(live);
    script
}

/// A request that is being answered: its caches, and how long it is and will be.
struct Request {
    caches: Vec<Block>,
    length: u64,
    end: u64,
}

/// A large model that answers requests which come and go. Their caches grow with every word, by a copy
/// into a longer one.
pub fn serving(random: &mut Random) -> Script {
    let width = 4096 << random.below(3);
    serving_of(width, random)
}

/// The same of a model whose caches are about as large as the chunks that memory comes in.
pub fn serving_small(random: &mut Random) -> Script {
    let width = 512 << random.below(3);
    serving_of(width, random)
}

/// Caches take `width` bytes a word.
fn serving_of(width: u64, random: &mut Random) -> Script {
    let mut script = Script::default();
    let layers = random.between(3, 12);
    let batch = random.between(2, 9) as usize;
    // Caches grow with every word, or by several words at a time.
    let step = [1, 1, 16, 64][random.below(4) as usize];
    let weights: Vec<Block> = (0..layers)
        .map(|_| script.take(width * random.between(1000, 9000), 0))
        .collect();
    let mut requests: Vec<Request> = Vec::new();
    let mut left = random.between(25, 45);
    while left > 0 || !requests.is_empty() {
        while left > 0 && requests.len() < batch && (requests.is_empty() || !random.once_in(3)) {
            left -= 1;
            let length = random.between(16, 1500);
            let end = length + random.between(10, 130);
            script.scratch(8 * width * length, 0);
            let bytes = width * length.next_multiple_of(step);
            let caches = (0..2 * layers).map(|_| script.take(bytes, 0)).collect();
            requests.push(Request {
                caches,
                length,
                end,
            });
        }
        for request in &mut requests {
            request.length += 1;
            for cache in &mut request.caches {
                script.scratch(width * 4, 0);
                if (request.length - 1) % step == 0 {
                    let longer = script.take(width * (request.length - 1 + step), 0);
                    script.give(std::mem::replace(cache, longer));
                }
            }
        }
        script.scratch(128 * KIB * requests.len() as u64, 0);
        let (ended, on) = requests.into_iter().partition(|it| it.length >= it.end);
        requests = on;
        let ended: Vec<Request> = ended;
        script.give_all(ended.into_iter().flat_map(|request| request.caches));
    }
    script.give_all(weights);
    script
}

/// One model trains while another serves, each on its stream, and neither knows of the other.
pub fn two_models(random: &mut Random) -> Script {
    let (first, second) = (training(random), serving(random));
    first.beside(second, 1, random)
}

/// Many streams that hand blocks on: made on one, used on another, freed by the last.
pub fn pipeline(random: &mut Random) -> Script {
    let mut script = Script::default();
    let streams = random.between(16, 65);
    let largest = random.between(MIB, 48 * MIB);
    let mut blocks: Vec<Block> = Vec::new();
    for _ in 0..20_000 {
        let stream = random.below(streams) as u16;
        let bytes = any_size(random, 64, largest);
        let block = script.take(bytes, stream);
        if random.once_in(3) {
            script.used_by(block, random.below(streams) as u16);
        }
        blocks.push(block);
        if blocks.len() > 256 || random.once_in(8) {
            let at = random.below(blocks.len() as u64) as usize;
            script.give(blocks.swap_remove(at));
        }
    }
    script.give_all(blocks);
    script
}

/// Sizes from a byte to gigabytes, allocated and freed in random order, on a few streams.
pub fn anything(random: &mut Random) -> Script {
    let mut script = Script::default();
    let streams = random.between(1, 7);
    let most = random.between(2, 40) * GIB;
    let largest = random.between(64 * MIB, 2 * GIB);
    let mut blocks: Vec<Block> = Vec::new();
    for _ in 0..20_000 {
        let stream = random.below(streams) as u16;
        let bytes = any_size(random, 1, largest);
        while script.live + bytes > most || (blocks.len() > 16 && random.once_in(2)) {
            let at = random.below(blocks.len() as u64) as usize;
            script.give(blocks.swap_remove(at));
        }
        blocks.push(script.take(bytes, stream));
    }
    script.give_all(blocks);
    script
}

/// Bytes and kilobytes, tens of thousands of them live at once.
pub fn small(random: &mut Random) -> Script {
    let mut script = Script::default();
    let many = random.between(1000, 20_000) as usize;
    let largest = KIB << random.between(1, 8);
    let mut blocks: Vec<Block> = Vec::new();
    for _ in 0..40_000 {
        if blocks.len() >= many {
            let at = random.below(blocks.len() as u64) as usize;
            script.give(blocks.swap_remove(at));
        }
        blocks.push(script.take(any_size(random, 1, largest), 0));
    }
    script.give_all(blocks);
    script
}

/// 2000 blocks of up to 16 MiB, of which one is replaced by another over and over.
pub fn replaced(random: &mut Random) -> Script {
    let mut script = Script::default();
    let mut blocks: Vec<Block> = (0..2000)
        .map(|_| script.take(any_size(random, 512, 16 * MIB), 0))
        .collect();
    for _ in 0..50_000 {
        let at = random.below(blocks.len() as u64) as usize;
        script.give(blocks[at]);
        blocks[at] = script.take(any_size(random, 512, 16 * MIB), 0);
    }
    script.give_all(blocks);
    script
}

/// Each power of two from the smallest to the largest is as likely as any other.
pub fn any_size(random: &mut Random, smallest: u64, largest: u64) -> u64 {
    let power = random.between(smallest.ilog2().into(), u64::from(largest.ilog2()) + 1);
    random
        .between(1 << power, 2 << power)
        .clamp(smallest, largest)
}
