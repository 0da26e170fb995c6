//! The input of a layout: the sizes of the parameters, and the rules of the buckets.

use super::BufferKey;
use crate::comm::DType;
use crate::mesh::Grid;

/// Bucket sizes are padded to a multiple of this many elements, so that a bucket of 16-bit elements starts at a
/// multiple of 256 bytes, as GEMMs require.
const BUCKET_MULTIPLE: usize = 128;

/// The multiple of elements with which ring collectives reach full bandwidth.
const BANDWIDTH_MULTIPLE: usize = 1 << 16;

/// The multiple of FP8 codes at which shards start: four are packed in a word, and devices move four words at
/// once.
const FP8_CODES_MULTIPLE: usize = 16;

/// The multiple, in elements, at which parameters of sharded buckets start: 128 bytes in 16 bits.
const PARAMETER_MULTIPLE: usize = 64;

/// One parameter of a rank, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterSize {
    /// Elements of the rank's part; 0 is valid.
    pub elements: usize,
    /// The dtype in which the parameter is gathered, and stored unless it is an FP8 weight: [`DType::U8`] for a
    /// weight whose FP8 codes are gathered.
    pub parameter: DType,
    /// The dtype in which its gradient is summed.
    pub gradient: DType,
    /// Its grid, which decides over which ranks its gradient is summed.
    pub grid: Grid,
    /// Whether the first and the last stage share it: it gets a bucket of its own.
    pub shared: bool,
    /// The unit of the model whose parameters may share a bucket: a pipeline stage, or under ZeRO-3 an FSDP
    /// unit.
    pub unit: usize,
    /// Bytes of both copies of an FP8 weight and of their scales; `None` for other parameters.
    pub quantized_bytes: Option<usize>,
}

/// When a bucket is closed, and how parameters and buckets are padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketRules {
    /// Elements at which a bucket is closed. Checked after each parameter, so a bucket may be larger. `None`:
    /// no limit.
    pub size: Option<usize>,
    /// Ranks over which a bucket of dense parameters is sharded.
    pub ranks: usize,
    /// Ranks over which a bucket of expert parameters is sharded. `None`: `ranks`.
    pub expert_ranks: Option<usize>,
    /// Whether bucket sizes are also padded to multiples of 65,536 elements.
    pub pad_for_bandwidth: bool,
    /// The multiple of elements at which parameters and buckets start. 1: packed.
    pub align: usize,
}

impl BucketRules {
    /// Buckets of the default size, sharded over the ranks; parameters start at multiples of 64 elements.
    pub fn sharded(ranks: usize) -> Self {
        Self {
            size: Some(Self::default_size(ranks)),
            ranks,
            expert_ranks: None,
            pad_for_bandwidth: false,
            align: PARAMETER_MULTIPLE,
        }
    }

    /// The default size of buckets: `max(40,000,000, 1,000,000 x ranks)` elements, so that the shards of a large
    /// group are large enough for an efficient message.
    pub fn default_size(ranks: usize) -> usize {
        ranks.saturating_mul(1_000_000).max(40_000_000)
    }

    /// `align` for sharded buckets on a device whose views must start at multiples of `bytes`, in elements of
    /// `dtype`: the least common multiple of 64 and the device's alignment, which for powers of two is
    /// `max(64, bytes / size)`.
    ///
    /// Parameters and gradients have the same layout, so pass the smaller of their dtypes.
    ///
    /// # Errors
    ///
    /// [`LayoutError::ZeroAlign`] for 0 bytes, [`LayoutError::PaddingOverflow`] if the result overflows.
    pub fn alignment(bytes: usize, dtype: DType) -> Result<usize, LayoutError> {
        if bytes == 0 {
            return Err(LayoutError::ZeroAlign);
        }
        let elements = bytes / gcd(bytes, dtype.size_of());
        lcm(PARAMETER_MULTIPLE, elements).ok_or(LayoutError::PaddingOverflow {
            ranks: 1,
            align: elements,
        })
    }

    /// Checks the rules; fails for the first invalid one.
    pub(super) fn check(&self) -> Result<(), LayoutError> {
        match (self.ranks, self.expert_ranks, self.size, self.align) {
            (0, ..) => Err(LayoutError::NoRanks { of: "dense" }),
            (_, Some(0), ..) => Err(LayoutError::NoRanks { of: "expert" }),
            (_, _, Some(0), _) => Err(LayoutError::ZeroSize {
                default: Self::default_size(self.ranks),
            }),
            (.., 0) => Err(LayoutError::ZeroAlign),
            _ => Ok(()),
        }
    }

    /// The shards of a bucket.
    pub(super) fn shards(&self, grid: Grid) -> usize {
        match grid {
            Grid::Dense => self.ranks,
            Grid::Expert => self.expert_ranks.unwrap_or(self.ranks),
        }
    }

    /// The multiple of elements to which bucket sizes are padded.
    pub(super) fn bucket_multiple(&self, key: &BufferKey) -> Result<usize, LayoutError> {
        let ranks = self.shards(key.grid);
        let codes = match (key.quantized, key.parameter) {
            (true, DType::U8) => FP8_CODES_MULTIPLE,
            _ => 1,
        };
        let bandwidth = if self.pad_for_bandwidth {
            BANDWIDTH_MULTIPLE
        } else {
            1
        };
        let shards = ranks.checked_mul(codes);
        let multiple = [shards, Some(BUCKET_MULTIPLE), Some(bandwidth)]
            .into_iter()
            .try_fold(self.align, |multiple, other| lcm(multiple, other?));
        multiple.ok_or(LayoutError::PaddingOverflow {
            ranks,
            align: self.align,
        })
    }
}

/// Why a layout cannot be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Buckets over 0 ranks.
    #[error("invalid number of ranks for buckets of {of} parameters: 0, expected at least 1")]
    NoRanks {
        /// `dense` or `expert`.
        of: &'static str,
    },
    /// A bucket size of 0.
    #[error(
        "invalid bucket size: 0 elements, expected at least 1 (the default is {default}), or no size for \
         one bucket"
    )]
    ZeroSize {
        /// The default size.
        default: usize,
    },
    /// An alignment of 0.
    #[error("invalid alignment: 0 elements, expected at least 1 (packed)")]
    ZeroAlign,
    /// The padding overflows.
    #[error(
        "the least multiple of {ranks} ranks and of {align} elements overflows {} bits; use fewer ranks or a \
         smaller alignment",
        usize::BITS
    )]
    PaddingOverflow {
        /// Ranks over which a bucket is sharded.
        ranks: usize,
        /// The alignment of parameters.
        align: usize,
    },
    /// A buffer is too large to be allocated.
    #[error(
        "with parameter {index} of {elements} elements the {key} buffer exceeds {limit} elements, the most \
         that can be allocated; split the model over more ranks"
    )]
    BufferTooLarge {
        /// The index of the parameter in the table.
        index: usize,
        /// Its elements.
        elements: usize,
        /// The buffer.
        key: BufferKey,
        /// The most elements that a buffer of these dtypes can have.
        limit: usize,
    },
    /// The number of elements overflows a `usize`.
    #[error(
        "the number of elements of the {buffers} buffers overflows {} bits; split the model over more ranks",
        usize::BITS
    )]
    ElementCountOverflow {
        /// The number of buffers.
        buffers: usize,
    },
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least common multiple of two numbers above 0.
fn lcm(a: usize, b: usize) -> Option<usize> {
    (a / gcd(a, b)).checked_mul(b)
}
