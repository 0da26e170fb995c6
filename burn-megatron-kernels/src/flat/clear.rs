//! Writes zeros to ranges of a flat buffer.

use std::ops::Range;
use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::backend::{DispatchDevice, DispatchTensor};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::check_range;
use crate::cpu::{Element, Real, for_float, own, slice_mut};
use crate::error::accept;
#[cfg(feature = "cubecl")]
use crate::launch::exactly;
use crate::launch::{SimpleOp, Spec, launch_one};

const NAME: &str = "clear";

/// The number of elements that a cube of the kernel sets to 0.
#[cfg_attr(not(feature = "cubecl"), allow(dead_code))]
pub(super) const PIECE: usize = 4096;

/// Ranges of a flat buffer for [`clear`]. They are stored on a device, so that several calls can use them.
#[derive(Clone, Debug)]
pub struct Ranges {
    ranges: Arc<[Range<usize>]>,
    /// The first element and the length of each piece, `[2 * pieces]`. It exists only on CubeCL devices.
    table: Option<Tensor<1, Int>>,
    pieces: usize,
}

impl Ranges {
    /// Creates ranges of a flat buffer on `device`, which must be the device of the buffer. Empty ranges are ignored.
    pub fn new(ranges: impl IntoIterator<Item = Range<usize>>, device: &Device) -> Self {
        let ranges = ranges.into_iter().filter(|range| !range.is_empty());
        let ranges: Arc<[_]> = ranges.collect();
        let on_cpu = matches!(
            device.clone().inner().as_dispatch(),
            DispatchDevice::Flex(_)
        );
        let piece = |range: &Range<usize>, start| {
            let length = PIECE.min(range.end - start);
            // The kernel reads the numbers as unsigned numbers.
            [start as u32 as i32, length as i32]
        };
        let pieces = |range: &Range<usize>| {
            let starts = range.clone().step_by(PIECE);
            starts
                .flat_map(|start| piece(range, start))
                .collect::<Vec<_>>()
        };
        let numbers: Vec<i32> = ranges.iter().flat_map(pieces).collect();
        let (count, pieces) = (numbers.len(), numbers.len() / 2);
        let table = (!on_cpu && count > 0).then(|| {
            let options = (&device.clone().inner(), DType::I32);
            Tensor::from_data(TensorData::new(numbers, [count]), options)
        });
        Self {
            ranges,
            table,
            pieces,
        }
    }
}

/// Writes zeros to `ranges` of `flat`, `[length]`. `flat` is updated in place if no other tensor shares its memory.
///
/// On CubeCL devices, one kernel launch clears all ranges.
///
/// # Panics
///
/// Panics with a [`KernelError`](crate::KernelError) if a range extends beyond the end of the buffer.
pub fn clear(flat: Tensor<1>, ranges: &Ranges) -> Tensor<1> {
    for range in ranges.ranges.iter() {
        accept(check_range(NAME, &flat, range.start, &[range.len()]));
    }
    if ranges.ranges.is_empty() {
        return flat;
    }
    let op = SimpleOp {
        name: NAME,
        parameters: (ranges.ranges.clone(), ranges.pieces),
        outputs: vec![Spec::of(&flat)],
        cpu: |(ranges, _), mut inputs| vec![clear_on_cpu(inputs.remove(0), ranges)],
        #[cfg(feature = "cubecl")]
        cube: |(ranges, pieces), inputs| {
            let [flat, table] = exactly(inputs);
            // A power of two divides the bitwise or of several numbers only if it divides all of them.
            let bits = |bits, range: &Range<usize>| bits | range.start | range.end;
            let bits = ranges.iter().fold(0, bits);
            vec![super::kernel::clear(flat, table, *pieces, bits)]
        },
    };
    let table = ranges.table.clone().map(Tensor::into_dispatch);
    let inputs: Vec<DispatchTensor> = [flat.into_dispatch()].into_iter().chain(table).collect();
    Tensor::from_dispatch(launch_one(op, inputs))
}

fn clear_on_cpu(flat: FlexTensor, ranges: &[Range<usize>]) -> FlexTensor {
    for_float!(flat.dtype(), E => {
        let mut flat = own::<E>(flat);
        let values = slice_mut::<E>(&mut flat);
        for range in ranges {
            values[range.clone()].fill(E::narrow(<E as Element>::Wide::ZERO));
        }
        flat
    })
}
