//! Assigns samples to groups of ranks, from all ranks down to single ranks, and then to micro-batches.

use std::ops::Range;

use super::{HybridContextConfig, HybridContextSlot, padded};

/// The maximum difference between the FLOPs of two ranks in a step, relative to the mean, as in Megatron.
const TOLERANCE: f64 = 0.05;

#[derive(Clone, Copy, Debug)]
struct Sample {
    index: usize,
    length: usize,
    flops: f64,
}

/// A group of ranks and its two halves.
struct Group {
    ranks: Range<usize>,
    /// The samples that all ranks of the group share, by micro-batch.
    bins: Vec<Vec<Sample>>,
    /// The two halves of the group; `None` for a single rank.
    halves: Option<Box<[Group; 2]>>,
}

/// Returns the slots of each micro-batch, in the order of their ranks.
pub(super) fn assign(
    config: &HybridContextConfig,
    lengths: &[usize],
) -> Vec<Vec<HybridContextSlot>> {
    let sample = |(index, &length): (usize, &usize)| Sample {
        index,
        length,
        flops: config.flops.of(length),
    };
    let mut samples: Vec<_> = lengths.iter().enumerate().map(sample).collect();
    // The sort is stable: samples of equal length keep their order.
    samples.sort_by_key(|sample| std::cmp::Reverse(sample.length));
    let mean = sum(&samples) / config.ranks as f64;
    // With this limit, the FLOPs per rank of the halves of n ranks differ by at most TOLERANCE / n of the mean. The
    // FLOPs of two ranks differ by at most the sum over n = 2, 4, 8, ...
    let limit = mean * TOLERANCE / 2.0;
    let mut all = Group::new(config, limit, 0..config.ranks, samples);
    let count = all.needed();
    all.spread(count);
    let mut micro_batches = vec![vec![]; count];
    all.fill(&mut micro_batches);
    micro_batches
}

impl Group {
    /// Assigns samples to a group and its halves. The samples are sorted by decreasing length.
    fn new(
        config: &HybridContextConfig,
        limit: f64,
        ranks: Range<usize>,
        samples: Vec<Sample>,
    ) -> Self {
        let size = ranks.len();
        let (own, halves) = if size == 1 {
            (samples, None)
        } else {
            let fits = |sample: &Sample| config.smallest_group(sample.length) < size;
            let (rest, mut own): (Vec<_>, Vec<_>) = samples.into_iter().partition(fits);
            let (shared, halves) = balanced(rest, size, limit);
            own.extend(shared);
            let middle = ranks.start + size / 2;
            let parts = [ranks.start..middle, middle..ranks.end];
            let mut halves = parts.into_iter().zip(halves);
            let mut half = || {
                let (ranks, samples) = halves.next().unwrap_or_default();
                Self::new(config, limit, ranks, samples)
            };
            (own, Some(Box::new([half(), half()])))
        };
        Self {
            bins: packed(own, size, config.capacity(size)),
            ranks,
            halves,
        }
    }

    /// Returns the minimum number of micro-batches that the ranks of the group need.
    fn needed(&self) -> usize {
        self.bins.len() + self.needed_below()
    }

    fn needed_below(&self) -> usize {
        let halves = self.halves.iter().flat_map(|halves| halves.iter());
        halves.map(Group::needed).max().unwrap_or(0)
    }

    /// Spreads the samples over `count` micro-batches, if there are enough samples.
    fn spread(&mut self, count: usize) {
        let most = count - self.needed_below();
        while self.bins.len() < most {
            let divisible = self.bins.iter_mut().filter(|bin| bin.len() > 1);
            let largest = divisible.max_by(|a, b| sum(a).total_cmp(&sum(b)));
            let Some(largest) = largest else {
                break;
            };
            let [kept, split] = in_two(std::mem::take(largest));
            *largest = kept;
            self.bins.push(split);
        }
        let below = count - self.bins.len();
        let halves = self.halves.iter_mut().flat_map(|halves| halves.iter_mut());
        halves.for_each(|half| half.spread(below));
    }

    /// Adds the slots of the group to micro-batches: first the slots of all its ranks, then the slots of its halves.
    fn fill(self, micro_batches: &mut [Vec<HybridContextSlot>]) {
        let (own, below) = micro_batches.split_at_mut(self.bins.len());
        let slot = |bin: Vec<Sample>| HybridContextSlot {
            ranks: self.ranks.clone(),
            samples: bin.iter().map(|sample| sample.index).collect(),
        };
        for (micro_batch, bin) in own.iter_mut().zip(self.bins) {
            micro_batch.push(slot(bin));
        }
        match self.halves {
            Some(halves) => {
                let [first, second] = *halves;
                first.fill(below);
                second.fill(below);
            }
            None => below.iter_mut().for_each(|rest| rest.push(slot(vec![]))),
        }
    }
}

fn sum(samples: &[Sample]) -> f64 {
    samples.iter().map(|sample| sample.flops).sum()
}

/// Selects the samples that a group of `size` ranks shares, so that the FLOPs of its halves differ by at most `limit`.
/// Also returns the samples of each half. A sample with fewer than two tokens per rank is not shared.
fn balanced(samples: Vec<Sample>, size: usize, limit: f64) -> (Vec<Sample>, [Vec<Sample>; 2]) {
    let divisible = |sample: &Sample| sample.length >= 2 * size;
    // These samples are too few for separate micro-batches.
    if sum(&samples) <= limit && samples.iter().all(divisible) {
        return (samples, [vec![], vec![]]);
    }
    let mut halves = in_two(samples);
    let mut shared = vec![];
    let mut flops = [sum(&halves[0]), sum(&halves[1])];
    loop {
        let heavy = usize::from(flops[1] > flops[0]);
        let difference = flops[heavy] - flops[1 - heavy];
        if difference <= limit {
            break;
        }
        let candidates = halves[heavy].iter().enumerate();
        let candidates = candidates.filter(|(_, sample)| divisible(sample));
        let off = |sample: &Sample| (sample.flops - difference).abs();
        let closest = candidates.min_by(|(_, a), (_, b)| off(a).total_cmp(&off(b)));
        let Some((at, _)) = closest else {
            break;
        };
        shared.push(halves[heavy].remove(at));
        flops[heavy] = sum(&halves[heavy]);
    }
    (shared, halves)
}

/// Splits samples into two parts of about equal FLOPs. Each sample, starting with the largest, goes to the part with
/// fewer FLOPs (Graham, "Bounds on multiprocessing timing anomalies", 1969).
fn in_two(samples: Vec<Sample>) -> [Vec<Sample>; 2] {
    let mut parts = [vec![], vec![]];
    let mut flops = [0.0; 2];
    for sample in samples {
        let to = usize::from(flops[1] < flops[0]);
        flops[to] += sample.flops;
        parts[to].push(sample);
    }
    parts
}

/// Packs samples into bins of at most `room` tokens. Each sample, starting with the largest, goes into the fullest bin
/// with enough room.
fn packed(mut samples: Vec<Sample>, size: usize, room: usize) -> Vec<Vec<Sample>> {
    samples.sort_by_key(|sample| std::cmp::Reverse(sample.length));
    let mut bins: Vec<(usize, Vec<Sample>)> = vec![];
    for sample in samples {
        let tokens = padded(sample.length, size);
        let fitting = bins.iter_mut().filter(|(used, _)| used + tokens <= room);
        match fitting.max_by_key(|(used, _)| *used) {
            Some((used, bin)) => {
                *used += tokens;
                bin.push(sample);
            }
            None => bins.push((tokens, vec![sample])),
        }
    }
    bins.into_iter().map(|(_, bin)| bin).collect()
}
