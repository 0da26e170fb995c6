//! The tokens that a router routes, which are all tokens except padding.

use std::sync::Arc;

use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use parking_lot::Mutex;

use crate::nn::context::SequenceShard;
use crate::nn::{AxisRank, RealTokens};

/// The padding and the positions of the tokens `[batch, seq]` of a forward pass, which routers need in addition to the
/// features. The position of a token is its index in its document.
/// [`BatchFormat::routed`](crate::nn::BatchFormat::routed) returns this value.
///
/// Padding tokens are sent to no expert. They do not count in router losses, loads, expert biases or capacities, and a
/// Sinkhorn assignment ignores them. The routing of real tokens therefore does not depend on padding.
#[derive(Clone, Debug)]
pub struct RoutedTokens(Arc<SharedTokens>);

#[derive(Debug)]
struct SharedTokens {
    shape: [usize; 2],
    positions: TokenPositions,
    real: Option<Arc<RealTokens>>,
    /// The part of this rank, which is the same in all layers.
    part: Mutex<Option<(PartKey, RankTokens)>>,
}

/// The positions of tokens in their documents.
#[derive(Clone, Debug)]
pub(in crate::nn) enum TokenPositions {
    /// Each row is one document.
    InRows,
    /// One number for each token, row by row.
    Each(Arc<[i32]>),
    /// The positions on a rank of a context group.
    Sharded(Arc<SequenceShard>),
}

/// The shape of a part, and its place among the tensor ranks.
type PartKey = ([usize; 2], AxisRank);

/// The tokens of one rank.
#[derive(Clone, Debug)]
pub(super) struct RankTokens {
    /// Whether each token is real, on the host and on the device, without autodiff. `None` if all tokens are real.
    real: Option<(Arc<[bool]>, Tensor<1, Bool>)>,
    /// The number of real tokens.
    pub count: usize,
    /// The number of real tokens of each sequence, over all ranks with parts of the same sequences.
    pub of_sequences: Arc<[usize]>,
}

impl RoutedTokens {
    /// Creates the description of a batch without padding in which each row is one document.
    pub fn rows(shape: [usize; 2]) -> Self {
        Self::new(shape, TokenPositions::InRows, None)
    }

    pub(in crate::nn) fn new(
        shape: [usize; 2],
        positions: TokenPositions,
        real: Option<Arc<RealTokens>>,
    ) -> Self {
        Self(Arc::new(SharedTokens {
            shape,
            positions,
            real,
            part: Mutex::default(),
        }))
    }

    /// Returns the part `[batch, seq]` at `place` among the tensor ranks. It is a part of each row, or a part of all
    /// tokens in one row that is filled up with padding. `ranks` ranks have parts of the same sequences.
    ///
    /// # Panics
    ///
    /// If the parts of all tensor ranks together have fewer tokens than `self`.
    pub(super) fn part(
        &self,
        [batch, seq]: [usize; 2],
        place: AxisRank,
        ranks: usize,
        device: &Device,
    ) -> RankTokens {
        let (tokens, all) = (self.len(), batch * seq * place.size);
        assert!(
            tokens <= all,
            "MoeForward::tokens has {:?} tokens, and the input {all}",
            self.0.shape
        );
        if tokens == all && self.0.real.is_none() {
            return RankTokens::all([batch, seq], ranks);
        }
        let key = ([batch, seq], place);
        let mut part = self.0.part.lock();
        if let Some((_, part)) = part.as_ref().filter(|(of, _)| *of == key) {
            return part.clone();
        }
        let real = self.0.real.as_ref();
        let is_real = real.map_or_else(|| vec![true; tokens], |real| real.is_real().to_vec());
        let in_rows = match real.map(|real| real.in_rows()) {
            Some(rows) if rows.len() == batch => rows.to_vec(),
            Some(rows) => vec![rows.iter().sum()],
            None => vec![tokens],
        };
        let own = RankTokens::new(own_part(is_real, false, key), in_rows, device);
        *part = Some((key, own.clone()));
        own
    }

    /// Returns the positions of the tokens of a [`part`](Self::part).
    pub(super) fn positions(&self, shape: [usize; 2], place: AxisRank) -> Vec<usize> {
        let [_, seq] = self.0.shape;
        let numbers = |all: &[i32]| all.iter().map(|number| *number as usize).collect();
        let all: Vec<usize> = match &self.0.positions {
            TokenPositions::InRows => (0..self.len()).map(|token| token % seq).collect(),
            TokenPositions::Each(all) => numbers(all),
            TokenPositions::Sharded(shard) => numbers(&shard.position_numbers(0..seq)),
        };
        own_part(all, 0, (shape, place))
    }

    fn len(&self) -> usize {
        self.0.shape.iter().product()
    }
}

/// Returns the part of a rank. All tokens together are filled up with `padding`.
fn own_part<T: Copy>(mut all: Vec<T>, padding: T, ([batch, seq], place): PartKey) -> Vec<T> {
    let row = seq * place.size;
    all.resize(batch * row, padding);
    let rows = all.chunks(row.max(1));
    let own = rows.flat_map(|row| &row[seq * place.index..][..seq]);
    own.copied().collect()
}

impl RankTokens {
    /// Creates the description of a rank's tokens if no token is padding.
    pub fn all([batch, seq]: [usize; 2], ranks: usize) -> Self {
        Self {
            real: None,
            count: batch * seq,
            of_sequences: vec![seq * ranks; batch].into(),
        }
    }

    fn new(is_real: Vec<bool>, of_sequences: Vec<usize>, device: &Device) -> Self {
        let data = TensorData::new(is_real.clone(), [is_real.len()]);
        Self {
            count: is_real.iter().filter(|real| **real).count(),
            real: Some((
                is_real.into(),
                Tensor::from_data(data, &device.clone().inner()),
            )),
            of_sequences: of_sequences.into(),
        }
    }

    /// Returns a mask on the host that is true for real tokens, or `None` if all tokens are real.
    pub fn is_real(&self) -> Option<&[bool]> {
        self.real.as_ref().map(|(host, _)| &host[..])
    }

    /// Returns a mask on the device that is true for real tokens, or `None` if all tokens are real.
    pub fn mask(&self) -> Option<Tensor<1, Bool>> {
        self.real.as_ref().map(|(_, mask)| mask.clone())
    }

    /// Replaces the expert choices `[tokens, k]` of padding tokens by -1, which means no expert.
    pub fn choices(&self, all: Tensor<2, Int>) -> Tensor<2, Int> {
        let Some(mask) = self.mask() else {
            return all;
        };
        let padding = mask.bool_not().unsqueeze_dim::<2>(1).expand(all.dims());
        all.mask_fill(padding, -1)
    }

    /// Returns the number of real tokens of all sequences.
    pub fn total(&self) -> f64 {
        self.of_sequences.iter().sum::<usize>() as f64
    }
}
