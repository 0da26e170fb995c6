//! The tensors of one layer and one sequence in a cache.

use burn::tensor::Tensor;

/// A cache without a window grows by this many tokens.
const GROWTH_TOKENS: usize = 256;

/// The first token of a cache with a window is a multiple of this many. It is a multiple of the tiles of the CPU's
/// attention, which so adds up the same scores as over the whole text.
const WINDOW_STEP: usize = 64;

/// Which tokens are new, and which are seen: by their number among this rank's of the sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// The first new token.
    pub first: usize,
    /// Behind the last new token.
    pub end: usize,
    /// The first token that a new one sees.
    pub seen: usize,
    /// The first that the next token will see.
    pub seen_later: usize,
    /// The number of tokens that see each other, if there is a window.
    pub window: Option<usize>,
    /// The most tokens of a sequence.
    pub capacity: usize,
}

impl Extent {
    /// The first token that a forward reads from the cache, and that the next one will.
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
            // The window and what is before it to the step, and another step until it moves.
            Some(window) => window.next_multiple_of(WINDOW_STEP) + 2 * WINDOW_STEP,
        };
        allocated.min(self.capacity)
    }
}

/// The tensors that a layer keeps of the tokens of a sequence, such as their keys and values.
#[derive(Clone, Debug, Default)]
pub(super) struct KvBuffer {
    /// `[1, allocated, groups, width]` each; none before the first token.
    tensors: Vec<Tensor<4>>,
    /// The number of their first token.
    start: usize,
}

impl KvBuffer {
    /// Drops all tokens; keeps the memory.
    pub fn clear(&mut self) {
        self.start = 0;
    }

    /// Whether the tokens from `seen` up to `end` are there.
    pub fn has(&self, seen: usize, end: usize) -> bool {
        end == 0 || self.start <= seen / WINDOW_STEP * WINDOW_STEP
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        let size = |x: &Tensor<4>| x.dims().iter().product::<usize>() * x.dtype().size();
        self.tensors.iter().map(size).sum()
    }

    /// The tensors of the tokens that are seen, and the number of the first; none if there are none.
    pub fn filled<const N: usize>(&self, extent: Extent) -> Option<([Tensor<4>; N], usize)> {
        let [from, _] = extent.starts();
        let tensors = <[Tensor<4>; N]>::try_from(self.tensors.clone()).ok();
        let tensors = tensors.filter(|_| extent.end > from)?;
        let seen = |x: Tensor<4>| x.narrow(1, from - self.start, extent.end - from);
        Some((tensors.map(seen), from))
    }

    /// Writes tensors of the new tokens, `[1, new, groups, width]`, and returns those of the tokens that are seen, and the
    /// number of the first. They are written in place where there is room; otherwise those that will be seen move
    /// to the beginning of new ones.
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
                    unreachable!("a layer keeps as many tensors as it did")
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

/// The place of tokens from `first` on.
fn range(first: usize, tokens: &Tensor<4>) -> [std::ops::Range<usize>; 4] {
    let [_, count, groups, width] = tokens.dims();
    [0..1, first..first + count, 0..groups, 0..width]
}
