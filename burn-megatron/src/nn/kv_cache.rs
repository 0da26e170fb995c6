//! Cache of keys and values for generation.

use burn::tensor::Tensor;

/// The cache grows by this many tokens.
const GROWTH_TOKENS: usize = 256;

/// Keys and values of the layers of one rank, for sequences of equal length.
///
/// It grows up to the model's longest sequence. All layers hold the same tokens: a forward writes after
/// the first [`len`](Self::len) tokens, and [`set_len`](Self::set_len) sets the new length.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Option<[Tensor<4>; 2]>>,
    capacity: usize,
    len: usize,
}

impl KvCache {
    /// An empty cache of `layers` layers, for at most `capacity` tokens per sequence.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self {
            layers: vec![None; layers],
            capacity,
            len: 0,
        }
    }

    /// The length of a sequence, in tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The maximum length of a sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Sets the length to `len`: larger after a forward, smaller to drop the last tokens.
    pub fn set_len(&mut self, len: usize) {
        self.len = len;
    }

    /// Its size on this rank in bytes.
    pub fn bytes(&self) -> usize {
        let tensors = self.layers.iter().flatten().flatten();
        tensors
            .map(|x| x.dims().iter().product::<usize>() * x.dtype().size())
            .sum()
    }

    /// The cache of layer `index` of this rank.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    pub fn layer(&mut self, index: usize) -> LayerKvCache<'_> {
        LayerKvCache {
            first: self.len,
            capacity: self.capacity,
            pair: &mut self.layers[index],
        }
    }
}

/// The keys and values of one layer.
#[derive(Debug)]
pub struct LayerKvCache<'a> {
    /// The position of the next token.
    first: usize,
    capacity: usize,
    /// `[sequences, allocated, groups, width]` each.
    pair: &'a mut Option<[Tensor<4>; 2]>,
}

impl LayerKvCache<'_> {
    /// The position of the next token.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Appends the keys and values of new tokens, `[sequences, new, groups, width]`, and returns all of
    /// them: `[sequences, first + new, groups, width]`.
    ///
    /// # Panics
    ///
    /// If the capacity is exceeded, or the number of sequences differs.
    pub(super) fn extend(self, new: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
        let [sequences, count, groups, width] = new[0].dims();
        let (first, end) = (self.first, self.first + count);
        assert!(
            end <= self.capacity,
            "a cache with a capacity of {} tokens holds {first}: {count} more do not fit",
            self.capacity
        );
        let old = match self.pair.take() {
            Some([k, v]) => {
                assert_eq!(
                    sequences,
                    k.dims()[0],
                    "the number of sequences must be that of the cache"
                );
                [Some(k), Some(v)]
            }
            None => [None, None],
        };
        let mut written = old.into_iter().zip(new).map(|(old, new)| {
            let allocated = self.grow(old, &new, end);
            allocated.slice_assign([0..sequences, first..end, 0..groups, 0..width], new)
        });
        let (Some(k), Some(v)) = (written.next(), written.next()) else {
            unreachable!("keys and values are two tensors")
        };
        drop(written);
        let filled = |x: &Tensor<4>| x.clone().narrow(1, 0, end);
        let all = [filled(&k), filled(&v)];
        *self.pair = Some([k, v]);
        all
    }

    /// A tensor for at least `end` tokens with the content of `old`, which is reused if it is large enough.
    fn grow(&self, old: Option<Tensor<4>>, new: &Tensor<4>, end: usize) -> Tensor<4> {
        let old = match old {
            Some(old) if end <= old.dims()[1] => return old,
            old => old,
        };
        let [sequences, _, groups, width] = new.dims();
        let tokens = end.next_multiple_of(GROWTH_TOKENS).min(self.capacity);
        let options = (&new.device(), new.dtype());
        let grown = Tensor::zeros([sequences, tokens, groups, width], options);
        let content = [0..sequences, 0..self.first, 0..groups, 0..width];
        match old {
            Some(old) if self.first > 0 => grown.slice_assign(content.clone(), old.slice(content)),
            _ => grown,
        }
    }
}
