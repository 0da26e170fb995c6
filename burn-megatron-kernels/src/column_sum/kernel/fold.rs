//! Adds the partial sums of several cubes in a fixed order.

use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::cube::instance::{AotList, instance, sequence, types};
use crate::cube::{empty, launch, own};
use crate::gradient::Place;

/// The number of sums per cube.
const CUBE_SUMS: u32 = 32;
/// The maximum number of units per cube.
const MAX_UNITS: u32 = 1024;

/// The maximum number of sets of sums per call.
const MAX_SETS: usize = 3;

/// The compile-time parameters of the fold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FoldVariant {
    /// The number of sets of sums, up to [`MAX_SETS`].
    sets: usize,
    /// Whether each set has its own target. Otherwise all sets have target 0.
    apart: bool,
    /// Whether each set is added to the existing values.
    add: [bool; MAX_SETS],
    /// The number of units per cube.
    units: u32,
}

/// The layout of partial sums, for `sets * width` sums. Term `k` of sum `i` is the element
/// `first + i * stride + k * step`, with `k < count`.
pub(crate) struct Partials {
    /// The partial sums in f32.
    pub tensor: CubeTensor,
    pub width: usize,
    pub count: usize,
    pub first: usize,
    pub stride: usize,
    pub step: usize,
}

/// The destination of the sums.
pub(crate) enum SumTarget {
    /// A new tensor of this type for each set of sums.
    Each(DType),
    /// A flat buffer, and the place of each set of sums in this buffer.
    Flat(CubeTensor, Vec<Place>),
}

impl SumTarget {
    /// Creates the target. With a place, the target is the flat buffer. Otherwise it is a new tensor of type `dtype`.
    pub(crate) fn new(flat: Option<CubeTensor>, place: Option<Place>, dtype: DType) -> Self {
        match flat.zip(place) {
            Some((flat, place)) => Self::Flat(flat, vec![place]),
            None => Self::Each(dtype),
        }
    }
}

impl Partials {
    /// Creates the layout of one set of `width` sums, `[count, width]`.
    pub(crate) fn of_rows(tensor: CubeTensor, width: usize, count: usize) -> Self {
        Self {
            tensor,
            width,
            count,
            first: 0,
            stride: 1,
            step: width,
        }
    }
}

#[cube(launch_unchecked)]
fn fold_kernel<W: Float>(
    partials: &Tensor<f32>,
    sums: &mut Sequence<OwnedTensor<W>>,
    width: u32,
    count: u32,
    first: u32,
    stride: u32,
    step: u32,
    at_first: u32,
    at_second: u32,
    at_third: u32,
    #[comptime] variant: FoldVariant,
    #[define(W)] _dtype: ElemType,
) {
    let along = comptime!(variant.units / CUBE_SUMS);
    let blocks = width.div_ceil(CUBE_SUMS);
    let set = CUBE_POS as u32 / blocks;
    let column = CUBE_POS as u32 % blocks * CUBE_SUMS + UNIT_POS % CUBE_SUMS;
    let inside = set < comptime!(variant.sets as u32) && column < width;
    let mut shared = Shared::<[f32]>::new_slice(comptime!(variant.units as usize));
    let mut part = 0.0f32;
    if inside {
        let start = first + (set * width + column) * stride;
        let mut k = UNIT_POS / CUBE_SUMS;
        while k < count {
            part += partials[(start + k * step) as usize];
            k += along;
        }
    }
    shared[UNIT_POS as usize] = part;
    sync_cube();
    if inside && UNIT_POS < CUBE_SUMS {
        let mut total = 0.0f32;
        for i in 0..along {
            total += shared[(i * CUBE_SUMS + UNIT_POS) as usize];
        }
        #[unroll]
        for i in 0..comptime!(variant.sets) {
            if set == i as u32 {
                let mut at = at_first;
                if comptime!(i == 1) {
                    at = at_second;
                }
                if comptime!(i == 2) {
                    at = at_third;
                }
                let to = sums.index_mut(comptime!(if variant.apart { i } else { 0 }));
                let add = comptime!(variant.add[i]);
                write::<W>(to.as_mut_slice(), at + column, total, add);
            }
        }
    }
}

/// Writes a sum to an element, or adds the sum to the element.
#[cube]
fn write<W: Float>(to: &mut [W], at: u32, sum: f32, #[comptime] add: bool) {
    let at = at as usize;
    let mut value = sum;
    if comptime!(add) {
        value += f32::cast_from(to[at]);
    }
    to[at] = W::cast_from(value);
}

/// Adds the partial sums of one set. Returns the sums, or the flat buffer.
pub(crate) fn fold(partials: Partials, target: SumTarget) -> Vec<CubeTensor> {
    fold_sets(partials, 1, target)
}

/// Computes [`fold`] for up to [`MAX_SETS`] consecutive sets. `sets` must equal the number of
/// places of the target.
pub(crate) fn fold_sets(partials: Partials, sets: usize, target: SumTarget) -> Vec<CubeTensor> {
    let Partials {
        tensor,
        width,
        count,
        first,
        stride,
        step,
    } = partials;
    let client = tensor.client.clone();
    let (sums, places) = match target {
        SumTarget::Each(dtype) => {
            let sum = |_| empty(&tensor, [width], dtype);
            ((0..sets).map(sum).collect(), None)
        }
        SumTarget::Flat(flat, places) => (vec![own(flat)], Some(places)),
    };
    let place = |set: usize| places.as_ref().and_then(|places| places.get(set));
    let offset = |set| place(set).map_or(0, |place| place.offset as u32);
    let add = |set| place(set).is_some_and(|place| place.add);
    let most = client.properties().hardware.max_units_per_cube;
    let variant = FoldVariant {
        sets,
        apart: places.is_none(),
        add: [add(0), add(1), add(2)],
        units: units(count, most),
    };
    if width > 0 {
        let dtype = dtype_to_storage_type(sums[0].dtype);
        let blocks = width.div_ceil(CUBE_SUMS as usize);
        let targets = sums.iter().cloned().map(CubeTensor::into_tensor_arg);
        let sequence: SequenceArg<_> = targets.collect();
        // SAFETY: a unit past the sums accesses no memory, and the places were checked.
        unsafe {
            launch!(
                fold_kernel,
                [client, blocks * sets, variant.units],
                [],
                [tensor, sequence],
                (
                    width as u32,
                    count as u32,
                    first as u32,
                    stride as u32,
                    step as u32
                ),
                (offset(0), offset(1), offset(2)),
                (variant, dtype)
            );
        }
    }
    sums
}

/// Returns the number of units per cube. If the device allows enough units, each unit adds at most eight terms.
fn units(count: usize, most: u32) -> u32 {
    let along = (count.div_ceil(8).next_power_of_two() as u32).min(MAX_UNITS / CUBE_SUMS);
    let most = (most / CUBE_SUMS).max(1);
    CUBE_SUMS * along.min(1 << most.ilog2())
}

/// Adds instances with one to three sets, for new tensors and for a flat buffer, with and without addition.
pub(super) fn aot_instances(list: &mut AotList) {
    for (name, dtype, _) in types() {
        for (form, sets, apart, add) in [
            ("one", 1, true, false),
            ("two", 2, true, false),
            ("three", 3, true, false),
            ("one-added", 1, false, true),
            ("two-added", 2, false, true),
            ("three-added", 3, false, true),
            ("two-written", 2, false, false),
        ] {
            let variant = FoldVariant {
                sets,
                apart,
                add: std::array::from_fn(|set| add && set < sets),
                units: MAX_UNITS,
            };
            let outputs = if apart { sets } else { 1 };
            instance!(
                list.other("column_sum/fold/{name}/{form}"), MAX_UNITS,
                fold_kernel::FoldKernel [_ (sequence(outputs)) _ _ _ _ _ _ _ _] (variant, dtype)
            );
        }
    }
}
