//! The layout of a rank's parameters in flat buffers, which are divided into buckets.
//!
//! The layout is computed from the sizes of the parameters, without allocating memory. Parameters are laid out in
//! reverse order of the parameter table, which is roughly the order in which the backward finishes their gradients.
//! Parameters with the same dtypes share a buffer. A buffer is a sequence of buckets, which are the units of
//! communication:
//!
//! ```text
//! buffer bf16/f32   |------------ bucket 0 ------------|------ bucket 1 ------|-- bucket 2 --|
//!                   | head | norm | block 1 ...|padding| block 0 ... |padding | tied  |pad.  |
//! shards            |  rank 0  |  rank 1  |  rank 2    | ...
//! ```
//!
//! Every bucket is sharded evenly over the ranks. The boundaries of shards are independent of the boundaries of
//! parameters, so a parameter may span several shards.
//!
//! The layout follows the rules of `_ParamAndGradBuffer` and `compute_full_param_layout` in Megatron-LM, with two
//! differences. Buckets of shared parameters always come last, even if buckets are not sharded. A bucket never extends
//! beyond a unit of the model (a pipeline stage or FSDP unit).

use std::fmt;
use std::ops::Range;

use crate::comm::DType;
use crate::mesh::Grid;

mod bucket;
mod buffer_builder;
mod rules;
mod table;
#[cfg(test)]
mod tests;
mod write_items;

pub use bucket::{Bucket, BucketParameter, ParameterSlice};
use buffer_builder::{IndexedSize, build_buffer};
pub use rules::{BucketRules, LayoutError, ParameterSize};
#[cfg(test)]
pub(crate) use write_items::MAX_ELEMENTS;
pub(crate) use write_items::chunks;
pub use write_items::{WriteItem, write_items};

/// The flat buffers of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BufferLayout {
    /// The buffers, one for each [`BufferKey`]. They are in the order of their first parameters.
    pub buffers: Vec<FlatBuffer>,
    /// The buffer of each bucket number, and the bucket's index in that buffer.
    bucket_positions: Vec<(usize, usize)>,
    /// The location of each parameter, by its index in the parameter table.
    locations: Vec<ParameterLocation>,
}

/// The key of a buffer: the properties that all parameters of the buffer share.
///
/// A key is displayed as the dtype of the parameters, the dtype of the gradients and the kind of the parameters.
/// Examples are `bf16/f32 dense`, and `u8/f32 dense fp8` for FP8 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferKey {
    /// The dtype in which the parameters are gathered. It is also the storage dtype, except for FP8 weights.
    pub parameter: DType,
    /// The dtype in which the gradients are summed.
    pub gradient: DType,
    /// The grid of ranks of the parameters: dense or expert.
    pub grid: Grid,
    /// Whether the parameters are FP8 weights, which are stored as two copies with their scales. If
    /// [`parameter`](Self::parameter) is [`DType::U8`], FP8 codes are gathered. If it is a floating-point type, values
    /// are gathered and then quantized.
    pub quantized: bool,
}

/// A flat buffer, which is a sequence of contiguous buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlatBuffer {
    /// The properties that all parameters of the buffer share.
    pub key: BufferKey,
    /// The number of elements of the buffer, including padding.
    pub elements: usize,
    /// The number of bytes of the FP8 weights in the buffer, including both copies and their scales. It is 0 for other
    /// parameters.
    pub quantized_bytes: usize,
    /// The buckets of the buffer, in the order in which they are reduced.
    pub buckets: Vec<Bucket>,
}

/// The location of a parameter in the buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterLocation {
    /// The number of the bucket.
    pub bucket: usize,
    /// The elements of the parameter, relative to the start of the bucket.
    pub range: Range<usize>,
}

impl BufferLayout {
    /// Computes the layout of the parameters of a rank, in the order of the parameter table.
    ///
    /// All ranks of a data-parallel group must have the same layout and therefore pass the same sizes.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] if the rules are invalid or a buffer is too large to allocate.
    pub fn new(parameters: &[ParameterSize], rules: &BucketRules) -> Result<Self, LayoutError> {
        rules.check()?;
        let mut members: Vec<(BufferKey, Vec<IndexedSize>)> = vec![];
        for (index, size) in parameters.iter().enumerate().rev() {
            let key = BufferKey::of(size);
            match members.iter_mut().find(|(other, _)| *other == key) {
                Some((_, members)) => members.push((index, size)),
                None => members.push((key, vec![(index, size)])),
            }
        }
        let buffers = members
            .iter()
            .map(|(key, members)| build_buffer(*key, members, rules))
            .collect::<Result<Vec<FlatBuffer>, _>>()?;
        let mut elements = buffers.iter().map(|buffer| buffer.elements);
        let total = elements.try_fold(0, usize::checked_add);
        total.ok_or(LayoutError::ElementCountOverflow {
            buffers: buffers.len(),
        })?;
        Ok(Self::index(buffers, parameters.len()))
    }

    /// Numbers the buckets in the order in which backward finishes them, and locates every parameter.
    fn index(buffers: Vec<FlatBuffer>, parameters: usize) -> Self {
        let mut buckets: Vec<_> = buffers
            .iter()
            .enumerate()
            .flat_map(|(buffer_index, buffer)| {
                let buckets = buffer.buckets.iter().enumerate();
                buckets.map(move |(index, bucket)| (buffer_index, index, bucket.order()))
            })
            .collect();
        buckets.sort_by_key(|(.., order)| *order);
        let mut bucket_positions = vec![];
        let unset = ParameterLocation {
            bucket: 0,
            range: 0..0,
        };
        let mut locations = vec![unset; parameters];
        for (buffer, bucket, _) in buckets {
            for BucketParameter { index, range } in &buffers[buffer].buckets[bucket].parameters {
                locations[*index] = ParameterLocation {
                    bucket: bucket_positions.len(),
                    range: range.clone(),
                };
            }
            bucket_positions.push((buffer, bucket));
        }
        Self {
            buffers,
            bucket_positions,
            locations,
        }
    }

    /// Returns the total number of elements of all buffers, including padding.
    pub fn elements(&self) -> usize {
        self.buffers.iter().map(|buffer| buffer.elements).sum()
    }

    /// Returns the total number of elements of all parameters, without padding.
    pub fn parameter_elements(&self) -> usize {
        self.locations
            .iter()
            .map(|location| location.range.len())
            .sum()
    }

    /// Returns the number of buckets in all buffers.
    pub fn bucket_count(&self) -> usize {
        self.bucket_positions.len()
    }

    /// Returns all buckets with their numbers and buffers, in the order in which they are reduced. Across all buffers,
    /// this is the order in which the backward finishes the buckets. The buckets of shared parameters come last.
    pub fn buckets(&self) -> impl Iterator<Item = (usize, &FlatBuffer, &Bucket)> {
        let number = |number| (number, self.buffer_of(number), self.bucket(number));
        (0..self.bucket_count()).map(number)
    }

    /// Returns a bucket by its number.
    ///
    /// # Panics
    ///
    /// Panics if `number` is out of range.
    pub fn bucket(&self, number: usize) -> &Bucket {
        let (buffer, bucket) = self.bucket_positions[number];
        &self.buffers[buffer].buckets[bucket]
    }

    /// Returns the buffer that contains a bucket.
    ///
    /// # Panics
    ///
    /// Panics if `number` is out of range.
    pub fn buffer_of(&self, number: usize) -> &FlatBuffer {
        &self.buffers[self.bucket_positions[number].0]
    }

    /// Returns the location of the parameter with this index in the parameter table, or `None` if `index` is out of
    /// range.
    pub fn find(&self, index: usize) -> Option<&ParameterLocation> {
        self.locations.get(index)
    }
}

impl BufferKey {
    fn of(size: &ParameterSize) -> Self {
        Self {
            parameter: size.parameter,
            gradient: size.gradient,
            grid: size.grid,
            quantized: size.quantized_bytes.is_some(),
        }
    }
}

impl fmt::Display for BufferKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fp8 = if self.quantized { " fp8" } else { "" };
        write!(f, "{}/{} {}{fp8}", self.parameter, self.gradient, self.grid)
    }
}

impl FlatBuffer {
    /// Returns the total number of elements of all shards of one rank, including padding.
    pub fn shard_elements(&self) -> usize {
        let shards = self.buckets.iter().map(Bucket::shard_elements);
        shards.sum()
    }
}
