//! Options of attention: scale, mask, heads, documents.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::KernelError;

/// Which keys a query sees, and the scale of the scores.
///
/// Query `i` is at the position of key `i + keys - queries`: both sequences end together.
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    /// The factor of the scores; without it `1 / sqrt(width)`.
    pub scale: Option<f64>,
    /// Causal: no query sees a key after its own position.
    pub causal: bool,
    /// No query sees a key farther away than this.
    pub window: Option<Window>,
    /// Document masking: several documents are packed into one sequence and do not see each other.
    pub documents: Option<Documents>,
}

/// A sliding window around the position of the query, which itself is always visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Visible keys before the position.
    pub left: usize,
    /// Visible keys after the position.
    pub right: usize,
}

/// The heads of a joint projection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Query heads; a multiple of `groups`.
    pub heads: usize,
    /// Heads of the keys and of the values; each serves `heads / groups` consecutive query heads.
    pub groups: usize,
    /// Features of a head.
    pub width: usize,
}

impl Heads {
    /// Features of the joint projection: `(heads + 2 groups) * width`.
    pub fn features(&self) -> usize {
        (self.heads + 2 * self.groups) * self.width
    }
}

/// The ends of the documents of a packed sequence, the same for every row of the batch.
#[derive(Clone, Debug)]
pub struct Documents {
    ends: Vec<usize>,
    bounds: Tensor<2, Int>,
}

impl Documents {
    /// Documents with the cumulative lengths `ends`: document `d` is `ends[d - 1]..ends[d]`, the
    /// first starts at 0. A document may be empty. `device` is that of the inputs of attention.
    ///
    /// # Errors
    ///
    /// If `ends` decreases, or exceeds the limit of 2^30 positions.
    pub fn new(ends: Vec<usize>, device: &Device) -> Result<Self, KernelError> {
        let refused = |value: String, fits| KernelError::Option {
            operation: "documents",
            name: "ends",
            value,
            fits,
        };
        if let Some(fall) = ends.windows(2).find(|pair| pair[0] > pair[1]) {
            let value = format!("[.., {}, {}, ..]", fall[0], fall[1]);
            return Err(refused(value, "cumulative lengths, which do not decrease"));
        }
        let length = ends.last().copied().unwrap_or(0);
        if length > MAX_POSITIONS {
            let fits = "a list that ends at or below 2^30";
            return Err(refused(length.to_string(), fits));
        }
        let starts = ranges(&ends).map(|range| range.start as i32);
        let stops = ranges(&ends).map(|range| range.end as i32);
        let values: Vec<i32> = starts.chain(stops).collect();
        let data = TensorData::new(values, [2, length]);
        // A mask is not part of the autodiff graph, so it is on the plain device.
        let bounds = Tensor::from_data(data, (&device.clone().inner(), DType::I32));
        Ok(Self { ends, bounds })
    }

    /// The sums of the lengths, as they were given.
    pub fn ends(&self) -> &[usize] {
        &self.ends
    }

    /// Positions of all documents together.
    pub fn length(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// `[2, length]`: for each position the start and the end of its document.
    pub fn bounds(&self) -> &Tensor<2, Int> {
        &self.bounds
    }

    /// For each position its document.
    pub(super) fn ranges(&self) -> Vec<std::ops::Range<usize>> {
        ranges(&self.ends).collect()
    }
}

/// Queries or keys of one sequence: kernels count positions in 32 bits with a sign.
pub(super) const MAX_POSITIONS: usize = 1 << 30;

fn ranges(ends: &[usize]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let starts = std::iter::once(0).chain(ends.iter().copied());
    let documents = starts.zip(ends.iter().copied());
    documents.flat_map(|(start, end)| (start..end).map(move |_| start..end))
}
