//! Tests layers on several ranks against one rank, and on one rank against Burn's operations.

mod batch_format;
mod build;
mod case;
mod dropout;
mod fp8;
mod gelu_epilogue;
mod hook;
mod latent_attention;
mod layers;
mod linear_loss;
mod loss;
mod overlap;
mod recompute;
mod recompute_settings;
mod references;
mod references_attention;
mod residual;
mod tp_comm_overlap;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};

use burn_megatron_kernels::rope::{RopeConfig, RopeTable, Scaling};

use super::{AxisRank, KvCache, ParameterTable, Placement, Placements, SequencePart};
use crate::comm::{ParallelContext, ParallelContextError, World};
use crate::mesh::{Axis, ParallelConfig};

/// Runs `f` on `ranks` threads that share the tensor axis.
fn over<T: Send>(ranks: usize, f: impl Fn(ParallelContext) -> T + Sync) -> Vec<T> {
    in_layout(&ParallelConfig::new().with_tensor(ranks), f)
}

/// Runs `f` on the threads of a layout without data parallelism.
fn in_layout<T: Send>(layout: &ParallelConfig, f: impl Fn(ParallelContext) -> T + Sync) -> Vec<T> {
    let run = |rank| Ok::<_, ParallelContextError>(f(ParallelContext::new(layout, &rank)?));
    World::threads(layout.tensor).unwrap().run(run).unwrap()
}

/// Makes a cache read `count` new tokens of each of `sequences` sequences.
fn read(cache: &mut KvCache, sequences: usize, count: usize) {
    let part = |sequence| SequencePart { sequence, count };
    let parts: Vec<_> = (0..sequences).map(part).collect();
    cache.read(&parts, sequences * count);
}

fn autodiff() -> Device {
    Device::flex().autodiff()
}

/// Returns f64 values that are close to one and all differ. Different phases give different values. The tensor is not
/// tracked by autodiff.
pub(super) fn wave<const D: usize>(shape: [usize; D], phase: f64) -> Tensor<D> {
    let value = |i: usize| (phase + 1.3 * i as f64).sin() + 0.3 * (2.0 * phase + i as f64).cos();
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_data(
        TensorData::new(values, shape),
        (&Device::flex(), DType::F64),
    )
}

/// Returns the table of the rotary embedding.
fn rotary(max_positions: usize, width: usize, base: f64, dtype: DType) -> RopeTable {
    let config = RopeConfig {
        width,
        max_positions,
        base,
        scaling: Scaling::None,
    };
    RopeTable::new(&config, &Device::flex(), dtype).unwrap()
}

/// Returns the tensor as a leaf of a graph.
pub(super) fn leaf<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    Tensor::from_inner(x).require_grad()
}

pub(super) fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().convert::<f64>().try_into_vec().unwrap()
}

/// Returns the part of a plain tensor on the rank at `place`. Padding is zero.
fn part<const D: usize>(whole: Tensor<D>, placement: &Placement, place: AxisRank) -> Tensor<D> {
    let Placement::Split { dim, sections } = placement else {
        return whole;
    };
    let mut padding = whole.dims();
    padding[*dim] = sections.iter().map(|section| section.size).sum::<usize>() - padding[*dim];
    let padded = match padding[*dim] {
        0 => whole,
        _ => Tensor::cat(
            vec![whole, Tensor::zeros(padding, (&Device::flex(), DType::F64))],
            *dim,
        ),
    };
    let ranges = placement
        .local_sections(place)
        .into_iter()
        .map(|section| section.whole);
    let ranges_of_dim = ranges.map(|range| padded.clone().narrow(*dim, range.start, range.len()));
    Tensor::cat(ranges_of_dim.collect(), *dim)
}

/// Assembles a tensor from the parts of all tensor ranks.
fn assemble<T: Copy + Default>(placement: &Placement, shape: &[usize], parts: &[Vec<T>]) -> Vec<T> {
    let size = parts.len();
    let parts = parts.iter().enumerate().map(|(index, part)| {
        let on = move |_| AxisRank { index, size };
        (on, &part[..])
    });
    Placements::from((Axis::Tensor, placement.clone())).assemble(shape, parts)
}

/// Sets every parameter to values that are close to one, so that biases affect the result.
fn filled<M: Module>(module: M, table: &ParameterTable, place: AxisRank) -> M {
    module.map(&mut FillParameters {
        table,
        place,
        index: 0,
    })
}

struct FillParameters<'a> {
    table: &'a ParameterTable,
    place: AxisRank,
    index: usize,
}

impl ModuleMapper for FillParameters<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let entry = &self.table.entries()[self.index];
        self.index += 1;
        let shape: [usize; D] = entry.shape.clone().try_into().unwrap();
        let whole = wave(shape, self.index as f64);
        param.map(|_| leaf(part(whole, entry.placements.on(Axis::Tensor), self.place)))
    }
}

/// Asserts that all values are within `1e-12` of the largest expected value, which must not be 0.
#[track_caller]
fn assert_close(what: &str, found: &[f64], expected: &[f64]) {
    assert_near(what, found, expected, 1e-12);
}

#[track_caller]
pub(super) fn assert_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    assert!(largest > 0.0, "{what}: nothing to compare with");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        let distance = (a - b).abs() / largest;
        // A comparison with NaN is false, so a NaN fails.
        assert!(
            distance <= tolerance,
            "{what}: element {i} is {a}, not {b}: off by {distance:e}"
        );
    }
}
