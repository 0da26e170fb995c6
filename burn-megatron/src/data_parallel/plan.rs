//! What does not change while a module is trained: which parameter lies where, on which ranks.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::Flex;
use burn::tensor::{DType, Device, Tensor};
use burn_megatron_kernels::flat;

use super::axes::Axes;
use super::config::DataParallelConfig;
use super::error::DataParallelError;
use super::layout::{BufferLayout, Piece};
use super::memory::{MemoryPlan, MemoryRules, ZeroStage};
use super::quantized;
use super::usage::{Category, Flat, Usage};
use crate::collective::{Comm, from_buffer, to_buffer};
use crate::comm::{self, BufferPool};
use crate::nn::fp8::WeightQuantizer;

/// The layout of one rank's parameters, and what it is carried out with.
#[derive(Debug)]
pub(crate) struct Plan {
    pub layout: BufferLayout,
    pub parameters: Vec<Shape>,
    pub axes: Axes,
    /// The tensor axis.
    pub tensor: Comm,
    pub config: DataParallelConfig,
    pub device: Device,
    pub pool: Arc<BufferPool>,
    pub usage: Usage,
}

/// A parameter of this rank.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub path: String,
    /// Of this rank's part.
    pub shape: Vec<usize>,
    /// The type in which it is computed with.
    pub model: DType,
    /// The type in which it is stepped, and its gradients are summed.
    pub main: DType,
    /// How it becomes 8 bits, where it is gathered to be kept so.
    pub quantizer: Option<Arc<dyn WeightQuantizer>>,
}

/// How the ranks keep the parameters of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// In the type of the model.
    Floats,
    /// In 8 bits, made of codes that were gathered.
    Codes,
    /// In 8 bits, made of values that were gathered.
    Blocks,
}

impl Plan {
    /// What this rank will hold.
    pub fn memory(&self) -> Result<MemoryPlan, DataParallelError> {
        let rules = MemoryRules::of(&self.config, self.axes.shard.size());
        Ok(MemoryPlan::new(&self.layout, &rules)?)
    }

    pub fn stage(&self) -> ZeroStage {
        self.config.zero_stage
    }

    pub fn buckets(&self) -> usize {
        self.layout.bucket_count()
    }

    /// The elements of a bucket.
    pub fn elements(&self, bucket: usize) -> usize {
        self.layout.bucket(bucket).padded()
    }

    /// The type of a bucket's parameters that a step gives for the forward, and the one of their
    /// masters. They are the same where 8-bit weights are made of the masters.
    pub fn types(&self, bucket: usize) -> (DType, DType) {
        let of = |first: &Shape| match first.quantizer {
            None => (first.model, first.main),
            Some(_) => (first.main, first.main),
        };
        self.first(bucket).map_or((DType::F32, DType::F32), of)
    }

    /// The type in which a bucket's parameters are computed with where they are not in 8 bits.
    pub fn gathered(&self, bucket: usize) -> DType {
        self.first(bucket).map_or(DType::F32, |first| first.model)
    }

    /// How a bucket's parameters are kept.
    pub fn kept(&self, bucket: usize) -> Kept {
        let quantizer = self
            .first(bucket)
            .and_then(|first| first.quantizer.as_deref());
        quantizer.map_or(Kept::Floats, quantized::kept)
    }

    /// One of the parameters of a bucket, which are alike.
    fn first(&self, bucket: usize) -> Option<&Shape> {
        let first = self.layout.bucket(bucket).parameters.first();
        first.map(|placed| &self.parameters[placed.index])
    }

    /// How a weight becomes 8 bits that is kept so.
    pub fn quantizer(&self, index: usize) -> &dyn WeightQuantizer {
        match &self.parameters[index].quantizer {
            Some(quantizer) => &**quantizer,
            None => unreachable!("parameter {index} is kept in its own type"),
        }
    }

    /// Rows and columns of an 8-bit weight.
    pub fn matrix(&self, index: usize) -> [usize; 2] {
        match self.parameters[index].shape[..] {
            [rows, columns] => [rows, columns],
            _ => unreachable!("parameter {index} was seen to be a matrix"),
        }
    }

    /// The place of a parameter among those of its bucket.
    pub fn position(&self, bucket: usize, index: usize) -> usize {
        let mut parameters = self.layout.bucket(bucket).parameters.iter();
        match parameters.position(|placed| placed.index == index) {
            Some(position) => position,
            None => unreachable!("parameter {index} lies in bucket {bucket}"),
        }
    }

    /// What this rank steps of a bucket.
    pub fn own(&self, bucket: usize) -> Range<usize> {
        self.axes.own(self.elements(bucket))
    }

    /// The stretches of parameters in what this rank steps of a bucket.
    pub fn own_pieces(&self, bucket: usize) -> Vec<Piece> {
        self.layout.bucket(bucket).pieces(self.own(bucket))
    }

    /// Where a parameter lies: its bucket, and its elements in it.
    pub fn place(&self, index: usize) -> (usize, Range<usize>) {
        match self.layout.find(index) {
            Some(place) => (place.bucket, place.range.clone()),
            None => unreachable!("parameter {index} is not in the table"),
        }
    }

    /// A flat tensor with anything in it.
    pub fn uninitialised(&self, elements: usize, dtype: DType) -> Tensor<1> {
        match wire(dtype).filter(|_| is_cpu(&self.device)) {
            Some(wire) => {
                let buffer = self.pool.take(wire, elements);
                from_buffer(buffer, [elements], &self.device, dtype)
            }
            None => Tensor::empty([elements], (&self.device, dtype)),
        }
    }

    /// A flat tensor of zeros.
    pub fn zeros(&self, elements: usize, dtype: DType) -> Tensor<1> {
        match wire(dtype).filter(|_| is_cpu(&self.device)) {
            Some(wire) => {
                let buffer = self.pool.take_zeroed(wire, elements);
                from_buffer(buffer, [elements], &self.device, dtype)
            }
            None => Tensor::zeros([elements], (&self.device, dtype)),
        }
    }

    /// A copy of a tensor, or of a view, in memory of its own.
    pub fn copy(&self, x: Tensor<1>) -> Tensor<1> {
        let memory = self.uninitialised(x.dims()[0], x.dtype());
        flat::accumulate(memory, 0, x, false)
    }

    /// Gives the memory of a tensor back where nobody else holds it.
    pub fn recycle(&self, x: Tensor<1>) {
        if is_cpu(&self.device)
            && let Some(x) = unshared(x)
        {
            self.pool.give(to_buffer(x));
        }
    }

    /// Sees to it that the pool has what a step can need at once, whichever rank is first or last: its
    /// inputs come home when the slowest rank has read them.
    pub fn reserve(&self) {
        if !is_cpu(&self.device) {
            return;
        }
        let mut needed: BTreeMap<(&str, usize), (comm::DType, usize)> = BTreeMap::new();
        for bucket in 0..self.buckets() {
            for (dtype, elements, count, most) in self.at_once(bucket) {
                if let Some(wire) = wire(dtype) {
                    let (_, known) = needed.entry((wire.name(), elements)).or_insert((wire, 0));
                    *known = (*known + count).min(most);
                }
            }
        }
        for ((_, elements), (wire, count)) in needed {
            let taken: Vec<_> = (0..count).map(|_| self.pool.take(wire, elements)).collect();
            taken.into_iter().for_each(|buffer| self.pool.give(buffer));
        }
    }

    /// The buffers that a step needs at once for a bucket: type, elements, how many, and the most for
    /// all buckets that are alike.
    fn at_once(&self, bucket: usize) -> Vec<(DType, usize, usize, usize)> {
        let (whole, own) = (self.elements(bucket), self.own(bucket).len());
        let (model, main) = self.types(bucket);
        let all = usize::MAX;
        let mut buffers = match (self.stage(), self.axes.data.size()) {
            (_, 1) => return vec![(main, whole, 1, all)],
            // The sums do not go where the parts came from, and each rank computes a share of them.
            (ZeroStage::Replicated, ranks) => {
                return vec![(main, whole, 2, all), (main, whole / ranks, 1, all)];
            }
            (ZeroStage::Optimizer, _) => vec![(main, whole, 1, all)],
            // One is filled, one is being summed, two may still be read by other ranks.
            (ZeroStage::Gradients, _) => vec![(main, whole, 2, 4)],
            (ZeroStage::Parameters, _) => vec![(main, whole, 2, 4), (model, whole, 2, 4)],
        };
        // The sum, what the optimizer makes of it, and what other ranks still read.
        buffers.push((main, own, 3, all));
        if self.kept(bucket) == Kept::Floats {
            buffers.push((model, own, 2, all));
        }
        buffers
    }

    /// Counts the bytes of a tensor.
    pub fn hold(&self, tensor: Tensor<1>, category: Category) -> Flat {
        Flat::new(tensor, category, &self.usage)
    }
}

/// The tensor, if nobody else holds its memory.
fn unshared(x: Tensor<1>) -> Option<Tensor<1>> {
    let x = x.try_into_primitive::<Flex>().ok()?;
    x.is_unique().then(|| Tensor::from_primitive::<Flex>(x))
}

/// The type in which elements travel.
pub(super) fn wire(dtype: DType) -> Option<comm::DType> {
    match dtype {
        DType::F64 => Some(comm::DType::F64),
        DType::F32 | DType::Flex32 => Some(comm::DType::F32),
        DType::BF16 => Some(comm::DType::BF16),
        DType::F16 => Some(comm::DType::F16),
        _ => None,
    }
}

fn is_cpu(device: &Device) -> bool {
    *device == Device::flex()
}
