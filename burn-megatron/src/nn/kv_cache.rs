//! Keys and values that stay, so that a decoder reads each token once.

use burn::tensor::Tensor;

/// Tokens by which a cache grows.
const GROWTH: usize = 256;

/// Keys and values of the tokens that the layers of one rank have read, of one sequence or of several
/// that are equally long.
///
/// It grows with what is read, up to the model's longest sequence. All layers hold the same tokens:
/// a forward writes behind the [`len`](Self::len) tokens that count, and [`keep`](Self::keep) says
/// how many count from then on.
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<Option<[Tensor<4>; 2]>>,
    capacity: usize,
    len: usize,
}

impl KvCache {
    /// An empty cache of so many layers, for at most `capacity` tokens of a sequence.
    pub fn new(layers: usize, capacity: usize) -> Self {
        Self {
            layers: vec![None; layers],
            capacity,
            len: 0,
        }
    }

    /// The tokens of a sequence that count.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The most tokens of a sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Lets the first `len` tokens count: more than before after a forward, fewer to take some back.
    pub fn keep(&mut self, len: usize) {
        self.len = len;
    }

    /// The bytes that it holds on this rank.
    pub fn bytes(&self) -> usize {
        let tensors = self.layers.iter().flatten().flatten();
        tensors
            .map(|x| x.dims().iter().product::<usize>() * x.dtype().size())
            .sum()
    }

    /// What it has for the layer number `index` of this rank.
    ///
    /// # Panics
    ///
    /// Where there is no such layer.
    pub fn layer(&mut self, index: usize) -> CachedLayer<'_> {
        CachedLayer {
            first: self.len,
            capacity: self.capacity,
            pair: &mut self.layers[index],
        }
    }
}

/// A layer's keys and values.
#[derive(Debug)]
pub struct CachedLayer<'a> {
    /// Tokens of a sequence before the next one.
    first: usize,
    capacity: usize,
    /// `[sequences, room, groups, width]` each.
    pair: &'a mut Option<[Tensor<4>; 2]>,
}

impl CachedLayer<'_> {
    /// The position of the next token.
    pub fn first(&self) -> usize {
        self.first
    }

    /// Writes the keys and values of new tokens, `[sequences, new, groups, width]`, behind the others,
    /// and gives all of them: `[sequences, first + new, groups, width]`.
    ///
    /// # Panics
    ///
    /// When more tokens come than there is room for, or other sequences.
    pub(super) fn extend(self, new: [Tensor<4>; 2]) -> [Tensor<4>; 2] {
        let [sequences, count, groups, width] = new[0].dims();
        let (first, end) = (self.first, self.first + count);
        assert!(
            end <= self.capacity,
            "a cache for {} tokens of a sequence has {first}, and {count} more do not fit",
            self.capacity
        );
        let old = match self.pair.take() {
            Some([k, v]) => {
                let held = k.dims()[0];
                assert_eq!(
                    held, sequences,
                    "a cache holds the same sequences in each forward"
                );
                [Some(k), Some(v)]
            }
            None => [None, None],
        };
        let mut written = old.into_iter().zip(new).map(|(old, new)| {
            let room = self.room(old, &new, end);
            room.slice_assign([0..sequences, first..end, 0..groups, 0..width], new)
        });
        let (Some(k), Some(v)) = (written.next(), written.next()) else {
            unreachable!("keys and values went in")
        };
        drop(written);
        let seen = |x: &Tensor<4>| x.clone().narrow(1, 0, end);
        let all = [seen(&k), seen(&v)];
        *self.pair = Some([k, v]);
        all
    }

    /// Room for `end` tokens, with those that are there. What nobody else holds is not copied.
    fn room(&self, old: Option<Tensor<4>>, new: &Tensor<4>, end: usize) -> Tensor<4> {
        let old = match old {
            Some(old) if end <= old.dims()[1] => return old,
            old => old,
        };
        let [sequences, _, groups, width] = new.dims();
        let room = end.next_multiple_of(GROWTH).min(self.capacity);
        let options = (&new.device(), new.dtype());
        let room = Tensor::zeros([sequences, room, groups, width], options);
        let kept = [0..sequences, 0..self.first, 0..groups, 0..width];
        match old {
            Some(old) if self.first > 0 => room.slice_assign(kept.clone(), old.slice(kept)),
            _ => room,
        }
    }
}
