//! The cached tensors of one layer and one sequence.

use burn::tensor::Tensor;

/// The number of tokens that are added when a cache without a window grows.
const GROWTH_TOKENS: usize = 256;

/// The granularity of the first token of a cache with a window, in tokens. The granularity is a multiple of the tile
/// size of attention on the CPU. Attention on the CPU therefore sums the same tiles of scores as over the full text.
const WINDOW_STEP: usize = 64;

/// The ranges of new and visible tokens, as indices of this rank's tokens of the sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// The index of the first new token.
    pub first: usize,
    /// The index after the last new token.
    pub end: usize,
    /// The index of the first token that is visible to a new token.
    pub seen: usize,
    /// The index of the first token that will be visible to the next token.
    pub seen_later: usize,
    /// The size of the sliding window in tokens, or `None` without a window.
    pub window: Option<usize>,
    /// The maximum number of tokens of a sequence.
    pub capacity: usize,
}

impl Extent {
    /// Returns the first token that this forward pass reads from the cache, and the first token that the next forward
    /// pass will read.
    fn starts(&self) -> [usize; 2] {
        match self.window {
            None => [0, 0],
            Some(_) => [self.seen, self.seen_later].map(|token| token / WINDOW_STEP * WINDOW_STEP),
        }
    }

    /// Returns the number of allocated tokens, at least `tokens`.
    fn allocated(&self, tokens: usize) -> usize {
        let allocated = match self.window {
            None => tokens.next_multiple_of(GROWTH_TOKENS),
            // Space for the window, for the tokens before it up to the granularity, and for one more step.
            Some(window) => window.next_multiple_of(WINDOW_STEP) + 2 * WINDOW_STEP,
        };
        allocated.min(self.capacity)
    }
}

/// The tensors that a layer keeps for the tokens of a sequence, such as keys and values.
#[derive(Clone, Debug, Default)]
pub(super) struct KvBuffer {
    /// Tensors of shape `[1, allocated, groups, width]`. Empty before the first token.
    tensors: Vec<Tensor<4>>,
    /// The index of the first token in the tensors.
    start: usize,
}

impl KvBuffer {
    /// Drops all tokens, but keeps the memory.
    pub fn clear(&mut self) {
        self.start = 0;
    }

    /// Returns whether the buffer holds the tokens from `seen` to `end`.
    pub fn has(&self, seen: usize, end: usize) -> bool {
        end == 0 || self.start <= seen / WINDOW_STEP * WINDOW_STEP
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        let size = |x: &Tensor<4>| x.dims().iter().product::<usize>() * x.dtype().size();
        self.tensors.iter().map(size).sum()
    }

    /// Returns the tensors of the visible tokens, and the index of the first one. Returns `None` if no tokens are
    /// visible.
    pub fn filled<const N: usize>(&self, extent: Extent) -> Option<([Tensor<4>; N], usize)> {
        let [from, _] = extent.starts();
        let tensors = <[Tensor<4>; N]>::try_from(self.tensors.clone()).ok();
        let tensors = tensors.filter(|_| extent.end > from)?;
        let seen = |x: Tensor<4>| x.narrow(1, from - self.start, extent.end - from);
        Some((tensors.map(seen), from))
    }

    /// Writes the tensors of the new tokens, `[1, new, groups, width]`. Returns the tensors of the visible tokens,
    /// and the index of the first one. Tensors are written in place if there is room. Otherwise the tokens that stay
    /// visible move to the beginning of new tensors.
    pub fn extend<const N: usize>(
        &mut self,
        new: [Tensor<4>; N],
        extent: Extent,
    ) -> ([Tensor<4>; N], usize) {
        let ([from, later], Extent { first, end, .. }) = (extent.starts(), extent);
        let allocated = self.tensors.first().map_or(0, |x| x.dims()[1]);
        let old = std::mem::take(&mut self.tensors);
        if end <= self.start + allocated {
            let mut old = old.into_iter();
            let written = new.map(|new| {
                let Some(old) = old.next() else {
                    unreachable!("the number of tensors of a layer does not change")
                };
                let at = first - self.start;
                old.slice_assign(range(at, &new), new)
            });
            self.tensors = written.to_vec();
            let seen = |x: Tensor<4>| x.narrow(1, from - self.start, end - from);
            return (written.map(seen), from);
        }
        let mut old = old.into_iter();
        let all = new.map(|new| match old.next() {
            Some(old) if first > from => {
                Tensor::cat(vec![old.narrow(1, from - self.start, first - from), new], 1)
            }
            _ => new,
        });
        let moved = |all: &Tensor<4>| {
            let rest = all.clone().narrow(1, later - from, end - later);
            let [_, _, groups, width] = rest.dims();
            let shape = [1, extent.allocated(end - later), groups, width];
            let grown = Tensor::zeros(shape, (&rest.device(), rest.dtype()));
            grown.slice_assign(range(0, &rest), rest)
        };
        self.tensors = all.iter().map(moved).collect();
        self.start = later;
        (all, from)
    }
}

/// Returns the slice of `tokens` that starts at token `first`.
fn range(first: usize, tokens: &Tensor<4>) -> [std::ops::Range<usize>; 4] {
    let [_, count, groups, width] = tokens.dims();
    [0..1, first..first + count, 0..groups, 0..width]
}
