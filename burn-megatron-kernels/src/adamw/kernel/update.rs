//! The kernel of the optimizer step. A unit updates one vector of four elements, which is 128 bits of each f32 buffer.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::adamw::DECAY_BLOCK;
use crate::adamw::outcome::elements::{DECAY, FACTOR, KIND, ROOT, SIZE};
use crate::adamw::update::StepScalars;
use crate::cube::instance::{AotList, instance, sequence, types};
use crate::cube::{RowPlan, empty, launch, own};

/// The number of units per cube. Units share no data, so any number that fills a multiprocessor works.
const UNITS: u32 = 256;

/// Updates one vector of weights and moments per unit.
///
/// - The hyperparameters are runtime arguments, so that no step compiles a new kernel.
/// - `outcome` holds at most one outcome. Its values replace `scale`, `size` and `root`, and `decay` is multiplied by
///   its weight decay. If the outcome is a skipped step, nothing changes.
/// - `factors` holds the factors of the weight decay, followed by the factors of the learning rate.
/// - `offset_in_block` is the position of the first element in its block, a multiple of `N`.
///
/// A multiplication that is followed by an addition is an explicit `fma` call. The compiler therefore cannot contract
/// it differently, and vectors of all lengths give the same bits.
#[cube(launch_unchecked)]
fn adamw_kernel<M: Float, G: Float, C: Float, N: Size>(
    master: &mut [Vector<f32, N>],
    first: &mut [Vector<M, N>],
    second: &mut [Vector<M, N>],
    gradient: &[Vector<G, N>],
    outcome: &Sequence<OwnedTensor<f32>>,
    factors: &Sequence<OwnedTensor<f32>>,
    model: &mut Sequence<OwnedTensor<Vector<C, N>>>,
    scale: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    size: f32,
    root: f32,
    epsilon: f32,
    decay: f32,
    offset_in_block: u32,
    vectors: u32,
    #[define(M, G, C)] _dtypes: [ElemType; 3],
) {
    let at = CUBE_POS * UNITS as usize + UNIT_POS as usize;
    if at < vectors as usize {
        let mut skipped = 0.0f32;
        let mut scale = scale;
        let mut size = size;
        let mut root = root;
        let mut decay = decay;
        #[unroll]
        for i in 0..outcome.len() {
            let numbers = outcome.index(i).as_slice();
            skipped = numbers[KIND];
            scale = numbers[FACTOR];
            size = numbers[SIZE];
            root = numbers[ROOT];
            decay *= numbers[DECAY];
        }
        let mut weights = master[at];
        if skipped == 0.0f32 {
            let g = Vector::<f32, N>::cast_from(gradient[at]) * Vector::new(scale);
            let m = fma(
                Vector::<f32, N>::cast_from(first[at]),
                Vector::new(beta1),
                g * Vector::new(rest1),
            );
            let v = fma(
                Vector::<f32, N>::cast_from(second[at]),
                Vector::new(beta2),
                g * g * Vector::new(rest2),
            );
            first[at] = Vector::cast_from(m);
            second[at] = Vector::cast_from(v);
            let below = fma(v.sqrt(), Vector::new(root), Vector::new(epsilon));
            let zero = Vector::<f32, N>::new(0.0f32);
            #[unroll]
            for i in 0..factors.len() {
                let block = (at * N::value() + offset_in_block as usize) / DECAY_BLOCK;
                let factor = factors.index(i).as_slice()[block];
                decay *= factor;
                if comptime!(i == 1) {
                    size *= factor;
                }
            }
            // With an epsilon of 0, the denominator is 0 for weights whose gradient was always 0, such as unused rows
            // of an embedding.
            let change = select_many(below.equal(&zero), zero, Vector::new(size) * m / below);
            weights -= fma(Vector::new(decay), weights, change);
            master[at] = weights;
        }
        #[unroll]
        for i in 0..model.len() {
            let copy = model.index_mut(i);
            copy.as_mut_slice()[at] = Vector::cast_from(weights);
        }
    }
}

/// Launches a step; see [`AdamWOp`](crate::adamw::update::AdamWOp) for the inputs.
pub(in crate::adamw) fn update(
    inputs: Vec<CubeTensor>,
    outcome: Option<CubeTensor>,
    model: Option<CubeTensor>,
    offset_in_block: usize,
    numbers: &StepScalars,
) -> Vec<CubeTensor> {
    let mut inputs = inputs.into_iter();
    let mut outputs: Vec<_> = inputs.by_ref().take(3).map(own).collect();
    let gradient: Vec<_> = inputs.by_ref().take(1).collect();
    let factors: Vec<_> = inputs.collect();
    let shape = outputs[0].shape();
    let length = shape.num_elements();
    outputs.extend(model.map(|model| {
        if model.can_mut() {
            return model;
        }
        empty(&model, model.shape(), model.dtype)
    }));
    let ([master, first, second, copy @ ..], [gradient]) = (&outputs[..], &gradient[..]) else {
        unreachable!("the kernel has four inputs and their factors")
    };
    if length == 0 {
        return outputs;
    }
    let client = master.client.clone();
    // A power of two divides the bitwise or of two numbers only if it divides both numbers. Therefore no vector spans
    // two blocks.
    let vector = RowPlan::new(&client, master.dtype, length | offset_in_block).vector;
    let vectors = length / vector;
    let types = [
        first.dtype,
        gradient.dtype,
        copy.first().unwrap_or(master).dtype,
    ];
    unsafe {
        launch!(
            adamw_kernel,
            [client, vectors.div_ceil(UNITS as usize), UNITS],
            [vector],
            [master, first, second, gradient],
            (
                outcome
                    .into_iter()
                    .map(CubeTensor::into_tensor_arg)
                    .collect(),
                factors
                    .into_iter()
                    .map(CubeTensor::into_tensor_arg)
                    .collect(),
                copy.iter()
                    .map(|copy| copy.clone().into_tensor_arg())
                    .collect()
            ),
            (
                numbers.scale as f32,
                numbers.first[0] as f32,
                numbers.first[1] as f32
            ),
            (numbers.second[0] as f32, numbers.second[1] as f32),
            (numbers.size as f32, numbers.root as f32),
            (numbers.epsilon as f32, numbers.decay as f32),
            (offset_in_block as u32, vectors as u32),
            (types.map(dtype_to_storage_type))
        );
    }
    outputs
}

/// Adds AOT instances with moments in f32 and bf16, and gradients in every type. All instances have an outcome, a copy
/// of the weights in the type of the gradient, and factors of weight decay and learning rate.
pub(super) fn aot_instances(list: &mut AotList) {
    let [(_, single, vector), _, (_, brain, _)] = types();
    for (moments, moment) in [("f32", single), ("bf16", brain)] {
        for (name, dtype, _) in types() {
            instance!(
                list.streaming("adamw/{name}/moments-{moments}"), UNITS,
                adamw_kernel::AdamwKernel
                [_ _ _ _ (sequence(1)) (sequence(2)) (sequence(1)) _ _ _ _ _ _ _ _ _ _ _]
                (vector, [moment, dtype, dtype])
            );
        }
    }
}
