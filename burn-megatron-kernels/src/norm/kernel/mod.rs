//! The CubeCL forms: how the kernels are launched.
//!
//! Rows of up to 128 vectors go to one plane each, several to a cube; longer ones to a cube each.
//! A row stays in registers, in its own type, if it fits, and is read again if not. Gradients of the
//! parameters are summed in registers over the rows of a cube, then over the cubes by a second
//! kernel; for rows that do not fit, by kernels of their own.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::prelude::*;

use self::backward::{
    FINISH_COLUMNS, FINISH_UNITS, Pass, norm_backward, norm_finish, norm_partials,
};
use self::forward::{Form, norm_forward};
use self::layout::{Budget, Layout};
use super::backward::{Gradients, Rule};
use crate::cube::{empty, grid};

mod backward;
mod forward;
mod layout;
mod specimens;

pub(crate) use specimens::specimens;

/// A row in registers and little else.
const FORWARD: Budget = Budget {
    wanted: 4,
    held: 8,
    units: 1024,
};
/// A row of the input, one of the gradient and two of sums: 512 units leave 128 registers for each.
const BACKWARD: Budget = Budget {
    wanted: 2,
    held: 4,
    units: 512,
};
/// Units of a cube of the sums over columns.
const PARTIAL_UNITS: u32 = 256;
/// Multiprocessors of a device that does not say how many it has.
const MULTIPROCESSORS: u32 = 32;
/// Units that a multiprocessor is given at most where rows are strided over cubes.
const RESIDENT: u32 = 1024;
/// Elements of rows that they keep: the registers of a multiprocessor hold eight numbers for each. More cubes
/// would wait for others to end, and leave their sums behind all the same.
const RESIDENT_ELEMENTS: usize = 8192;

/// Rows and width of a tensor.
fn sizes(tensor: &CubeTensor) -> (usize, usize) {
    let shape = tensor.shape();
    let width = shape[shape.num_dims() - 1];
    (shape.num_elements() / width, width)
}

fn multiprocessors(client: &Client) -> usize {
    let hardware = &client.properties().hardware;
    let known = hardware.num_streaming_multiprocessors;
    known.unwrap_or(MULTIPROCESSORS) as usize
}

/// `[x, residual?, weight, bias?]` to `[y, statistics, sum?]`.
pub(super) fn forward(rule: Rule, residual: bool, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let mut inputs = inputs.into_iter();
    let (Some(x), Some(second)) = (inputs.next(), inputs.next()) else {
        unreachable!("a norm has an input and a weight")
    };
    let (sum, weight) = match residual {
        true => (Some(second), inputs.next()),
        false => (None, Some(second)),
    };
    let Some(weight) = weight else {
        unreachable!("a norm has a weight")
    };
    let bias = inputs.next();
    let (rows, width) = sizes(&x);
    let client = x.client.clone();
    let y = empty(&x, x.shape(), x.dtype);
    let statistics = empty(&x, [rows, rule.statistics()], DType::F32);
    let form = Form {
        centred: rule.centred,
        zero_centered: rule.options.zero_centered,
        add: residual,
        bias: bias.is_some(),
    };
    // Where nothing is added, the input stands for the residual and the sum, which are not touched.
    let residual = sum.unwrap_or_else(|| x.clone());
    let source = match form.add {
        true => empty(&x, x.shape(), residual.dtype),
        false => x.clone(),
    };
    if rows > 0 {
        let (layout, vector) = Layout::new(&client, x.dtype, width, FORWARD);
        let types = [x.dtype, residual.dtype, weight.dtype].map(dtype_to_storage_type);
        let bias = bias.unwrap_or_else(|| weight.clone());
        // SAFETY: a unit past the rows or the columns touches nothing, and all inputs are
        // contiguous and of the sizes that the public functions check.
        unsafe {
            norm_forward::launch_unchecked(
                &client,
                grid(&client, rows.div_ceil(layout.rows())),
                layout.cube_dim(),
                vector,
                x.into_tensor_arg(),
                residual.into_tensor_arg(),
                weight.into_tensor_arg(),
                bias.into_tensor_arg(),
                source.clone().into_tensor_arg(),
                y.clone().into_tensor_arg(),
                statistics.clone().into_tensor_arg(),
                rule.options.epsilon as f32,
                rows as u32,
                form,
                layout,
                types,
            );
        }
    }
    match form.add {
        true => vec![y, statistics, source],
        false => vec![y, statistics],
    }
}

/// `[source, statistics, gradient, weight, so far?]` to the gradients that are asked for.
pub(super) fn backward(rule: Rule, asked: Gradients, inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let mut inputs = inputs.into_iter();
    let (Some(source), Some(statistics), Some(gradient), Some(weight)) =
        (inputs.next(), inputs.next(), inputs.next(), inputs.next())
    else {
        unreachable!("a norm saves its input, statistics and weight")
    };
    let so_far = inputs.next();
    let pass = Pass {
        centred: rule.centred,
        zero_centered: rule.options.zero_centered,
        input: asked.input,
        onto: so_far.is_some(),
        parameters: asked.parameters(),
    };
    let mut outputs = Vec::new();
    let rows = Rows {
        source,
        statistics,
        gradient,
    };
    let (dx, partials) = rows.launch(pass, &weight, so_far);
    if asked.input {
        outputs.push(dx);
    }
    if let Some(partials) = partials {
        let [of_weight, of_bias] = finish(partials, asked, &weight);
        outputs.extend(asked.weight.then_some(of_weight));
        outputs.extend(asked.bias.then_some(of_bias));
    }
    outputs
}

/// The rows that a backward reads.
struct Rows {
    source: CubeTensor,
    statistics: CubeTensor,
    gradient: CubeTensor,
}

impl Rows {
    /// The gradient of the input (a scrap if it is not asked for), and partial sums
    /// `[parts, parameters, width]` if some are.
    fn launch(
        self,
        pass: Pass,
        weight: &CubeTensor,
        so_far: Option<CubeTensor>,
    ) -> (CubeTensor, Option<CubeTensor>) {
        let (rows, width) = sizes(&self.source);
        let client = self.source.client.clone();
        let (layout, vector) = Layout::new(&client, self.gradient.dtype, width, BACKWARD);
        let blocks = rows.div_ceil(layout.rows());
        let units = RESIDENT_ELEMENTS / (layout.kept() * vector);
        let cubes = units.min(RESIDENT as usize) / layout.units as usize;
        let resident = multiprocessors(&client) * cubes.max(2);
        // At least one, so that the sums over no rows are written.
        let cubes = blocks.min(resident).max(1);
        let parameters = pass.parameters;
        let partials = |parts| empty(&self.source, [parts, parameters, width], DType::F32);
        let scrap = |dtype| empty(&self.source, [vector], dtype);
        let together = layout.held && parameters > 0;

        let dx = match pass.input {
            true => empty(&self.source, self.source.shape(), self.source.dtype),
            false => scrap(self.source.dtype),
        };
        let mut sums = match together {
            true => Some(partials(cubes)),
            false => None,
        };
        if together || pass.input && rows > 0 {
            let types = [self.gradient.dtype, self.source.dtype, weight.dtype];
            let so_far = so_far.unwrap_or_else(|| self.source.clone());
            let to = sums.clone().unwrap_or_else(|| scrap(DType::F32));
            // SAFETY: as in `forward`; a cube writes its own part of the partial sums alone.
            unsafe {
                norm_backward::launch_unchecked(
                    &client,
                    grid(&client, cubes),
                    layout.cube_dim(),
                    vector,
                    self.source.clone().into_tensor_arg(),
                    self.statistics.clone().into_tensor_arg(),
                    self.gradient.clone().into_tensor_arg(),
                    weight.clone().into_tensor_arg(),
                    so_far.into_tensor_arg(),
                    dx.clone().into_tensor_arg(),
                    to.into_tensor_arg(),
                    rows as u32,
                    cubes as u32,
                    pass,
                    layout,
                    types.map(dtype_to_storage_type),
                );
            }
        }
        if parameters > 0 && !together {
            let blocks = layout.columns.div_ceil(PARTIAL_UNITS as usize);
            let wanted = multiprocessors(&client) * (RESIDENT / PARTIAL_UNITS) as usize;
            let strips = wanted.div_ceil(blocks).min(rows).max(1);
            let to = partials(strips);
            let types = [self.gradient.dtype, self.source.dtype].map(dtype_to_storage_type);
            // SAFETY: as above.
            unsafe {
                norm_partials::launch_unchecked(
                    &client,
                    grid(&client, strips * blocks),
                    CubeDim::new_1d(PARTIAL_UNITS),
                    vector,
                    self.source.into_tensor_arg(),
                    self.statistics.into_tensor_arg(),
                    self.gradient.into_tensor_arg(),
                    to.clone().into_tensor_arg(),
                    rows as u32,
                    strips as u32,
                    pass,
                    layout.columns,
                    PARTIAL_UNITS,
                    types,
                );
            }
            sums = Some(to);
        }
        (dx, sums)
    }
}

/// The gradients of the weight and of the bias, in the weight's type; a scrap for the one that is
/// not asked for.
fn finish(partials: CubeTensor, asked: Gradients, weight: &CubeTensor) -> [CubeTensor; 2] {
    let client = partials.client.clone();
    let shape = partials.shape();
    let (parts, parameters, width) = (shape[0], shape[1], shape[2]);
    let dtype = weight.dtype;
    let output = |asked: bool| empty(weight, [if asked { width } else { 1 }], dtype);
    let outputs = [output(asked.weight), output(asked.bias)];
    let [of_weight, of_bias] = outputs.clone();
    let first = u32::from(!asked.weight);
    let blocks = width.div_ceil(FINISH_COLUMNS as usize) * (parameters - first as usize);
    let most = client.properties().hardware.max_units_per_cube;
    let units = FINISH_UNITS.min(1 << most.ilog2());
    // SAFETY: cubes past the last parameter and units past the width touch nothing.
    unsafe {
        norm_finish::launch_unchecked(
            &client,
            grid(&client, blocks),
            CubeDim::new_1d(units),
            partials.into_tensor_arg(),
            of_weight.into_tensor_arg(),
            of_bias.into_tensor_arg(),
            parts as u32,
            width as u32,
            first,
            parameters as u32,
            units,
            dtype_to_storage_type(dtype),
        );
    }
    outputs
}
