//! The CubeCL implementation, which launches the kernels.
//!
//! A cube processes a tile of 128 x 128 elements and keeps it in registers. It computes the scales of the rows and
//! columns through shared memory or plane operations, and writes the codes of both copies. Largest magnitudes are
//! compared as bits. This comparison is exact and independent of the order, and it propagates NaN.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;

use self::copies::quantize_kernel;
#[cfg(test)]
pub(super) use self::plan::with_cuda_forms;
use self::plan::{QuantizePlan, RowLoads, is_cuda};
use self::reduce::{FinishVariant, finish_kernel, scale_kernel};
use self::values::{DequantizeVariant, VECTORS, amax_kernel, dequantize_kernel};
use super::super::matrix::words;
use super::ops::QuantizeOp;
use super::scaling::{CurrentScale, ScalingKind};
use crate::activation::kernel::ActivationVariant;
use crate::cube::{empty, launch, own};
use crate::fp8::format::Format;
use crate::fp8::kernel::tile::UNITS;
use crate::fp8::matrix::BLOCK;
use crate::launch::{Spec, exactly};

mod aot_instances;
mod copies;
mod input;
mod lines;
mod plan;
pub(crate) mod reduce;
mod scale;
mod values;

pub(crate) use aot_instances::aot_instances;

/// Quantizes a matrix. See [`QuantizeOp`].
pub(super) fn quantize(kernel: &QuantizeOp, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
    let log = kernel.slot.and_then(|_| inputs.pop()).map(own);
    let x = inputs.remove(0);
    let client = x.client.clone();
    let [rows, columns] = kernel.sizes(&[x.shape()[0], x.shape()[1]]);
    let plan = kernel.plan(&x, columns);
    let cubes = rows.div_ceil(BLOCK) * columns.div_ceil(BLOCK);
    // An output that is not requested is a single vector that the kernel does not access.
    let scrap = || empty(&x, [4], DType::U32);
    let copy = |made: bool, sizes| {
        if made {
            outputs(&x, kernel.kind, sizes)
        } else {
            [scrap(), scrap()]
        }
    };
    let rowwise = copy(kernel.usage.rowwise, [rows, columns]);
    let columnwise = copy(kernel.usage.columnwise, [columns, rows]);
    let partials = empty(&x, [cubes.max(1), 2], DType::U32);
    let has_bias = kernel.activation.is_some_and(|activation| activation.bias);
    let bias = has_bias.then(|| inputs.remove(0));
    let given = inputs.pop().unwrap_or_else(scrap);
    if cubes > 0 {
        // SAFETY: a unit writes only inside the matrix and its padded rows, and the outputs have
        // these sizes.
        unsafe {
            launch!(
                quantize_kernel,
                [client, cubes, UNITS],
                [plan.vector, plan.patch() / 4, 4],
                [&x, bias, &given],
                [&rowwise[0], &rowwise[1]],
                [&columnwise[0], &columnwise[1], &partials],
                (kernel.given as u32, rows as u32, columns as u32),
                (plan, dtype_to_storage_type(x.dtype))
            );
        }
    }
    let descale = match (kernel.kind, kernel.usage.rowwise) {
        (ScalingKind::Tensor, true) => rowwise[1].clone(),
        (ScalingKind::Tensor, false) => columnwise[1].clone(),
        _ => scrap(),
    };
    let variant = FinishVariant {
        counts: true,
        logged: log.is_some(),
        descale: kernel.kind == ScalingKind::Tensor,
        planes: plan.planes,
    };
    let seen = log.unwrap_or_else(|| empty(&x, [2], DType::F32));
    Finish {
        variant,
        partials,
        parts: cubes,
        given,
        index: kernel.given,
        slot: kernel.slot.unwrap_or(0),
        elements: rows * columns,
    }
    .launch(&seen, &descale);
    let mut all = vec![];
    for (made, [codes, scales]) in [
        (kernel.usage.rowwise, rowwise),
        (kernel.usage.columnwise, columnwise),
    ] {
        if made {
            let one = kernel.kind == ScalingKind::Tensor;
            all.extend([codes, if one { descale.clone() } else { scales }]);
        }
    }
    all.push(seen);
    all
}

impl QuantizeOp {
    /// Returns the launch layout for a matrix with `columns` columns.
    fn plan(&self, x: &CubeTensor, columns: usize) -> QuantizePlan {
        let RowLoads { vector, planes } = RowLoads::new(x, x.dtype, columns);
        let plane = x.client.properties().hardware.plane_size_min as usize;
        let cuda = is_cuda(x);
        QuantizePlan {
            kind: self.kind,
            format: self.format,
            usage: self.usage,
            activation: self.activation.map(ActivationVariant::from),
            vector,
            planes,
            plane: if planes { plane } else { 1 },
            flushes: !cuda,
            unrolled: cuda,
        }
    }
}

/// Allocates the codes and the scales of a copy.
fn outputs(like: &CubeTensor, kind: ScalingKind, [rows, depth]: [usize; 2]) -> [CubeTensor; 2] {
    let Spec { shape, dtype } = kind.spec([rows, depth]);
    [
        empty(like, [rows, words(depth)], DType::U32),
        empty(like, shape, dtype),
    ]
}

/// The second launch of a quantizer or of [`amax`](super::amax). See [`finish_kernel`].
struct Finish {
    variant: FinishVariant,
    partials: CubeTensor,
    parts: usize,
    given: CubeTensor,
    index: usize,
    slot: usize,
    elements: usize,
}

impl Finish {
    fn launch(self, seen: &CubeTensor, descale: &CubeTensor) {
        let client = self.partials.client.clone();
        // SAFETY: one cube reads the partial results and writes one or two words, or an existing
        // entry of a log.
        unsafe {
            launch!(
                finish_kernel,
                [client, 1, UNITS],
                [],
                [self.partials, self.given, seen, descale],
                (self.parts as u32, self.index as u32, self.slot as u32),
                (self.elements as f32),
                (self.variant)
            );
        }
    }
}

/// Computes the largest magnitude. See [`amax`](super::amax).
pub(super) fn amax(x: CubeTensor) -> CubeTensor {
    let client = x.client.clone();
    let count = x.shape().num_elements();
    let RowLoads { vector, planes } = RowLoads::new(&x, x.dtype, count);
    let vectors = count / vector;
    let cubes = vectors.div_ceil((UNITS * VECTORS) as usize);
    let partials = empty(&x, [cubes.max(1)], DType::U32);
    let [seen, scrap] = [DType::F32, DType::U32].map(|dtype| empty(&x, [1], dtype));
    if cubes > 0 {
        let dtype = dtype_to_storage_type(x.dtype);
        // SAFETY: units past the end access no memory.
        unsafe {
            launch!(
                amax_kernel,
                [client, cubes, UNITS],
                [vector],
                [x, &partials],
                (vectors as u32),
                (planes, dtype)
            );
        }
    }
    let variant = FinishVariant {
        counts: false,
        logged: false,
        descale: false,
        planes,
    };
    Finish {
        variant,
        partials,
        parts: cubes,
        given: empty(&seen, [1], DType::U32),
        index: 0,
        slot: 0,
        elements: count,
    }
    .launch(&seen, &scrap);
    seen
}

/// Computes the scale. See [`current_scale`](super::current_scale).
pub(super) fn scale_of(amax: CubeTensor, format: Format, options: CurrentScale) -> CubeTensor {
    let client = amax.client.clone();
    let scale = empty(&amax, [1], DType::F32);
    // If -0 were compared as bits, it would be larger than every positive number.
    let epsilon = options.epsilon.abs();
    // SAFETY: one unit reads and writes one word.
    unsafe {
        launch!(
            scale_kernel,
            [client, 1, 1],
            [],
            [amax, &scale],
            (epsilon, options.power_of_two, format)
        );
    }
    scale
}

/// Computes the values. See [`dequantize`](super::dequantize).
pub(super) fn dequantize(
    inputs: Vec<CubeTensor>,
    format: Format,
    kind: ScalingKind,
    depth: usize,
) -> CubeTensor {
    let [codes, scales] = exactly(inputs);
    let client = codes.client.clone();
    let rows = codes.shape()[0];
    let values = empty(&codes, [rows, depth], DType::F32);
    let units = rows * depth.div_ceil(4);
    if units > 0 {
        let vector = if depth.is_multiple_of(4) { 4 } else { 1 };
        let reading = DequantizeVariant {
            kind,
            format,
            flushes: !is_cuda(&codes),
        };
        // SAFETY: units past the rows access no memory, and codes and scales were checked.
        unsafe {
            launch!(
                dequantize_kernel,
                [client, units.div_ceil(UNITS as usize), UNITS],
                [vector],
                [codes, scales, &values],
                (rows as u32, depth as u32),
                (reading, vector)
            );
        }
    }
    values
}
