//! On CubeCL devices.
//!
//! One unit turns one vector (or pair of vectors) of a few heads of a token, with the cosines and
//! sines in registers; other units copy what does not turn, unless the launch is in place.

use burn::backend::TensorMetadata;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::{ComptimeOptionArgs, OwnedTensor, TensorArg};

use super::check::NAME;
use super::{Heads, Pairing};
use crate::error::{accept, check_size};

mod latent;
mod launched;
mod specimens;
mod turn;

pub(super) use latent::{keys, keys_back};
pub(super) use launched::turn;
pub(crate) use specimens::specimens;

/// Units of a cube where nothing is measured.
const UNITS: u32 = 256;

/// The most heads that one unit turns where nothing is measured: its loads are under way at once, and
/// more do not fit into the registers that leave a device full of units.
const MOST_HEADS: usize = 2;

/// How the heads of a tensor are spread over units. Features are counted in vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Plan {
    /// Elements of a vector.
    vector: usize,
    /// Elements of a vector of the table.
    lanes: usize,
    /// Vectors of the table that belong to one item.
    loads: usize,
    heads: usize,
    turned: usize,
    /// Heads of one unit; a divisor of `turned`.
    group: usize,
    features: usize,
    first: usize,
    /// Turned features of a head.
    width: usize,
    /// Parts of a head that one unit turns: a vector of neighbours, or two vectors.
    items: usize,
    /// From an item's first vector to that of the next item.
    stride: usize,
    /// From an item's first vector to its second; 0 where pairs lie within one vector.
    distance: usize,
}

impl Plan {
    /// With vectors as long as the device and all widths allow, `others` included.
    fn new(client: &Client, dtype: DType, heads: Heads, others: &[usize]) -> Self {
        let turning = match heads.pairing {
            Pairing::Halves => heads.width / 2,
            Pairing::Interleaved => heads.width,
        };
        let widths = [heads.features, heads.first, turning];
        let fits = |size: &usize| widths.iter().chain(others).all(|w| w.is_multiple_of(*size));
        let vector = client.io_optimized_vector_sizes(dtype.size()).find(fits);
        Self::with_vector(heads, vector.unwrap_or(1))
    }

    fn with_vector(heads: Heads, vector: usize) -> Self {
        let half = heads.width / 2;
        let (pairs, items, stride, distance) = match heads.pairing {
            Pairing::Halves => (vector, half / vector, 1, half / vector),
            Pairing::Interleaved if vector == 1 => (1, half, 2, 1),
            Pairing::Interleaved => (vector / 2, heads.width / vector, 1, 0),
        };
        let lanes = pairs.min(4);
        Self {
            vector,
            lanes,
            loads: pairs / lanes,
            heads: heads.heads,
            turned: heads.turned,
            group: 1,
            features: heads.features / vector,
            first: heads.first / vector,
            width: heads.width / vector,
            items,
            stride,
            distance,
        }
        .grouped(MOST_HEADS)
    }

    /// With as many heads for a unit as divide what turns, up to `most`.
    fn grouped(self, most: usize) -> Self {
        let divides = |group: &usize| self.turned.is_multiple_of(*group);
        let group = (1..=most).rev().find(divides).unwrap_or(1);
        Self { group, ..self }
    }

    /// Units that turn one token.
    fn turning(&self) -> usize {
        self.turned / self.group * self.items
    }

    /// Vectors of one token that do not turn.
    fn passing(&self) -> usize {
        self.heads * self.features - self.turned * self.width
    }
}

/// The table and the positions of a launch.
#[derive(Clone)]
pub(super) struct Angles {
    cosine: CubeTensor,
    sine: CubeTensor,
    each: Option<CubeTensor>,
    seq: usize,
    start: usize,
    direction: f32,
}

impl Angles {
    /// Of the last inputs of a launch.
    pub(super) fn new(inputs: Vec<CubeTensor>, seq: usize, start: usize, back: bool) -> Self {
        let mut inputs = inputs.into_iter();
        let (Some(cosine), Some(sine)) = (inputs.next(), inputs.next()) else {
            unreachable!("every launch of this operation has cosines and sines")
        };
        Self {
            cosine,
            sine,
            each: inputs.next(),
            seq,
            start,
            direction: if back { -1.0 } else { 1.0 },
        }
    }

    /// The last position of the table.
    fn last(&self) -> u32 {
        self.cosine.shape()[0] as u32 - 1
    }

    fn table(&self) -> [TensorArg; 2] {
        [&self.cosine, &self.sine].map(|table| table.clone().into_tensor_arg())
    }

    fn each(&self) -> ComptimeOptionArgs<OwnedTensor<i32>> {
        self.each.clone().map(CubeTensor::into_tensor_arg).into()
    }
}

/// Cubes of `units` units, for `items` units of each of `tokens` tokens.
///
/// Units are counted in 32 bits; only tensors of scalars (odd widths) near the limit have more.
fn cubes(tokens: usize, items: usize, units: u32) -> usize {
    accept(check_size(NAME, &[tokens, items]));
    (tokens * items).div_ceil(units as usize)
}
