//! The CubeCL implementation, which launches the kernels.
//!
//! Rows of up to 128 vectors are processed by one plane each, with several planes per cube. Longer rows are processed
//! by one cube each. A row that fits in registers stays there in its own type. Other rows are read again. Parameter
//! gradients are summed in registers over the rows of a cube. A second kernel then adds the sums of the cubes. For rows
//! that do not fit in registers, separate kernels compute the sums.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;

use self::backward::{NormBackwardVariant, norm_backward, norm_partials};
use self::forward::{NormVariant, norm_forward};
use self::layout::{RegisterBudget, RowLayout};
use super::backward::{NamedInputs, NormBackwardOp, NormForwardOp};
use crate::column_sum::kernel::{Partials, SumTarget, column_sum, fold_sets};
use crate::cube::{empty, launch};
use crate::gradient::Place;
use crate::launch::exactly;

mod aot_instances;
mod backward;
mod forward;
mod layout;

pub(crate) use aot_instances::aot_instances;

/// The register budget for a row and little else.
const FORWARD: RegisterBudget = RegisterBudget {
    wanted: 4,
    plane_columns: 128,
    in_registers: 8,
    units: 1024,
};
/// The register budget for a row of the input, a row of the gradient and two rows of sums. With 512 units, each unit
/// has 128 registers.
const BACKWARD: RegisterBudget = RegisterBudget {
    wanted: 2,
    plane_columns: 128,
    in_registers: 4,
    units: 512,
};
/// The register budget of [`BACKWARD`] with three rows of sums, which need more registers.
const BACKWARD_WITH_X_BIAS: RegisterBudget = RegisterBudget {
    units: 256,
    plane_columns: 64,
    ..BACKWARD
};
/// The number of units of a cube that sums over columns.
const PARTIAL_UNITS: u32 = 256;
/// The number of multiprocessors that is assumed if the device does not report it.
const MULTIPROCESSORS: u32 = 32;
/// The maximum number of resident units per multiprocessor for kernels in which a cube processes every n-th block of
/// rows.
const RESIDENT_UNITS: u32 = 1024;
/// The number of row elements that the resident cubes of a multiprocessor keep in registers. The registers of a
/// multiprocessor hold eight numbers for each of these elements. Additional cubes would only wait in the queue and
/// produce additional partial sums.
const RESIDENT_ELEMENTS: usize = 8192;

/// Returns the number of rows and the width of a tensor.
fn sizes(tensor: &CubeTensor) -> (usize, usize) {
    let shape = tensor.shape();
    let width = shape[shape.num_dims() - 1];
    (shape.num_elements() / width, width)
}

fn multiprocessors(client: &Client) -> usize {
    let hardware = &client.properties().hardware;
    let row_statistics = hardware.num_streaming_multiprocessors;
    row_statistics.unwrap_or(MULTIPROCESSORS) as usize
}

/// Computes the forward pass. See [`NormForwardOp`].
pub(super) fn forward(op: &NormForwardOp, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let formula = op.formula;
    let NamedInputs {
        x,
        residual,
        weight,
        bias,
        x_bias,
    } = op.inputs.split(inputs);
    let (rows, width) = sizes(&x);
    let client = x.client.clone();
    let y = empty(&x, x.shape(), x.dtype);
    let statistics = empty(&x, [rows, formula.statistics()], DType::F32);
    let variant = NormVariant {
        centred: formula.centred,
        zero_centered: formula.options.zero_centered,
        add: residual.is_some(),
        bias: bias.is_some(),
        x_bias: x_bias.is_some(),
    };
    // Without a residual, the input is passed as a placeholder for the residual and the sum, which the kernel neither
    // reads nor writes. Without biases, the weight is passed as a placeholder for them.
    let residual = residual.unwrap_or_else(|| x.clone());
    let source = if variant.add {
        empty(&x, x.shape(), residual.dtype)
    } else {
        x.clone()
    };
    if rows > 0 {
        let (layout, vector) = RowLayout::new(&client, x.dtype, width, FORWARD);
        let bias = bias.unwrap_or_else(|| weight.clone());
        let x_bias = x_bias.unwrap_or_else(|| weight.clone());
        let types = [&x, &residual, &weight, &x_bias].map(|tensor| tensor.dtype);
        // SAFETY: a unit past the rows or the columns accesses no memory. All inputs are contiguous
        // and have the sizes that the public functions check.
        unsafe {
            launch!(
                norm_forward,
                [client, rows.div_ceil(layout.rows()), layout.units],
                [vector],
                [x, residual, weight, bias, x_bias],
                [&source, &y, &statistics],
                (formula.options.epsilon as f32, rows as u32),
                (variant, layout, types.map(dtype_to_storage_type))
            );
        }
    }
    if variant.add {
        vec![y, statistics, source]
    } else {
        vec![y, statistics]
    }
}

/// Computes the backward pass. See [`NormBackwardOp`].
pub(super) fn backward(op: &NormBackwardOp, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let (formula, wanted) = (op.formula, op.wanted);
    let flat = op.places.as_ref().and_then(|_| inputs.pop());
    let so_far = inputs.split_off(4).pop();
    let [source, statistics, gradient, weight] = exactly(inputs);
    let [of_weight, of_bias, of_x_bias] = wanted.parameters;
    let variant = NormBackwardVariant {
        centred: formula.centred,
        zero_centered: formula.options.zero_centered,
        input: wanted.input,
        onto: wanted.input && so_far.is_some(),
        weight: of_weight,
        bias: of_bias,
        x_bias: of_x_bias,
    };
    let rows = BackwardInputs {
        source,
        statistics,
        gradient,
    };
    let width = sizes(&rows.source).1;
    let (dx, partials) = rows.launch(variant, &weight, so_far);
    let mut sums = Sums {
        dtype: op.sums,
        flat,
        places: op.places.as_deref().unwrap_or_default(),
        each: vec![],
    };
    let mut left = variant.sums();
    if let Some(tensor) = partials {
        let shape = tensor.shape();
        let (count, sets) = (shape[0], shape[1]);
        let partials = Partials {
            tensor,
            width,
            count,
            first: 0,
            stride: 1,
            step: sets * width,
        };
        sums.add(sets, |target| fold_sets(partials, sets, target));
        left -= sets;
    }
    if left > 0 {
        // If the rows do not fit in registers, the gradient of the input is summed from memory.
        sums.add(1, |target| column_sum(dx.clone(), width, target));
    }
    let input = wanted.input.then_some(dx);
    input
        .into_iter()
        .chain(sums.each)
        .chain(sums.flat)
        .collect()
}

/// The parameter gradients in order, as tensors of type `dtype` or in a flat buffer.
struct Sums<'a> {
    dtype: DType,
    flat: Option<CubeTensor>,
    /// The places of gradients that are not in the buffer yet.
    places: &'a [Place],
    each: Vec<CubeTensor>,
}

impl Sums<'_> {
    /// Adds the next `sets` gradients, which `sum` computes.
    fn add(&mut self, sets: usize, sum: impl FnOnce(SumTarget) -> Vec<CubeTensor>) {
        match self.flat.take() {
            Some(flat) => {
                let (places, rest) = self.places.split_at(sets);
                self.places = rest;
                self.flat = sum(SumTarget::Flat(flat, places.to_vec())).pop();
            }
            None => self.each.extend(sum(SumTarget::Each(self.dtype))),
        }
    }
}

/// The inputs of a backward pass.
struct BackwardInputs {
    source: CubeTensor,
    statistics: CubeTensor,
    gradient: CubeTensor,
}

impl BackwardInputs {
    /// Returns the gradient of the input, and partial sums `[parts, sums, width]` if any are requested. If the gradient
    /// of the input is not requested, it is a placeholder. For rows that do not fit in registers, the partial sums of
    /// `dx` are missing.
    fn launch(
        self,
        variant: NormBackwardVariant,
        weight: &CubeTensor,
        so_far: Option<CubeTensor>,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let (rows, width) = sizes(&self.source);
        let client = self.source.client.clone();
        let budget = if variant.x_bias {
            BACKWARD_WITH_X_BIAS
        } else {
            BACKWARD
        };
        let (layout, vector) = RowLayout::new(&client, self.gradient.dtype, width, budget);
        let blocks = rows.div_ceil(layout.rows());
        let units = RESIDENT_ELEMENTS / (layout.kept() * vector);
        let cubes = units.min(RESIDENT_UNITS as usize) / layout.units as usize;
        let resident = multiprocessors(&client) * cubes.max(2);
        // There is at least one cube, so that empty sums are written too.
        let cubes = blocks.min(resident).max(1);
        let sets = if layout.in_registers {
            variant.sums()
        } else {
            usize::from(variant.weight) + usize::from(variant.bias)
        };
        let partials = |parts| empty(&self.source, [parts, sets, width], DType::F32);
        let scrap = |dtype| empty(&self.source, [vector], dtype);
        let together = layout.in_registers && sets > 0;

        let dx = if variant.input {
            empty(&self.source, self.source.shape(), self.source.dtype)
        } else {
            scrap(self.source.dtype)
        };
        let mut sums = if together {
            Some(partials(cubes))
        } else {
            None
        };
        if together || variant.input && rows > 0 {
            let types = [self.gradient.dtype, self.source.dtype, weight.dtype];
            let so_far = so_far.unwrap_or_else(|| self.source.clone());
            let to = sums.clone().unwrap_or_else(|| scrap(DType::F32));
            // SAFETY: as in `forward`. A cube writes only its own part of the partial sums.
            unsafe {
                launch!(
                    norm_backward,
                    [client, cubes, layout.units],
                    [vector],
                    [&self.source, &self.statistics, &self.gradient],
                    [weight, so_far, &dx, to],
                    (rows as u32, cubes as u32),
                    (variant, layout, types.map(dtype_to_storage_type))
                );
            }
        }
        if sets > 0 && !together {
            let blocks = layout.columns.div_ceil(PARTIAL_UNITS as usize);
            let wanted = multiprocessors(&client) * (RESIDENT_UNITS / PARTIAL_UNITS) as usize;
            let strips = wanted.div_ceil(blocks).min(rows).max(1);
            let to = partials(strips);
            let types = [self.gradient.dtype, self.source.dtype].map(dtype_to_storage_type);
            // SAFETY: as above.
            unsafe {
                launch!(
                    norm_partials,
                    [client, strips * blocks, PARTIAL_UNITS],
                    [vector],
                    [self.source, self.statistics, self.gradient],
                    [&to],
                    (rows as u32, strips as u32),
                    (variant, layout.columns, PARTIAL_UNITS, types)
                );
            }
            sums = Some(to);
        }
        (dx, sums)
    }
}
