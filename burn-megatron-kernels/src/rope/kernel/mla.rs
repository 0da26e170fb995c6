//! The kernels for the queries and keys of multi-head latent attention.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::rotate::{TokenAngles, cosines, rotate_item, sines, swapped_neighbors, table_row};
use super::{AngleArgs, RopePlan, UNITS, cubes};
use crate::cube::{empty, launch, output_over};
use crate::rope::{MlaDims, RotaryHeads};

/// Returns the sizes [`MlaDims`] in vectors.
pub(super) fn in_vectors(mla: MlaDims, plan: RopePlan) -> MlaDims {
    MlaDims {
        nope: mla.nope / plan.vector,
        value: mla.value / plan.vector,
    }
}

/// Computes queries and keys. For each token, the first `queries` units process the queries. The next units rotate the
/// shared part of the key and write it to all heads. The last units copy the parts of the keys that are not shared.
#[cube(launch_unchecked)]
pub(super) fn mla_forward_kernel<F: Float, N: Size, T: Size>(
    q: &Tensor<Vector<F, N>>,
    kv: &Tensor<Vector<F, N>>,
    shared: &Tensor<Vector<F, N>>,
    cosine: &Tensor<Vector<f32, T>>,
    sine: &Tensor<Vector<f32, T>>,
    each: &ComptimeOption<OwnedTensor<i32>>,
    rotated: &mut Tensor<Vector<F, N>>,
    k: &mut Tensor<Vector<F, N>>,
    angles: &TokenAngles,
    #[comptime] plan: RopePlan,
    #[comptime] mla: MlaDims,
    #[comptime] queries: usize,
    #[define(F)] _dtype: ElemType,
) {
    let own = comptime!(plan.heads * mla.nope);
    let items = comptime!(queries + plan.items + own);
    let unit = CUBE_POS * comptime!(UNITS as usize) + UNIT_POS as usize;
    let token = unit / items;
    if token < angles.tokens as usize {
        let item = unit % items;
        let row = table_row(each, token, angles, plan);
        let keys = token * comptime!(plan.heads * plan.features);
        if item < queries {
            let direction = angles.direction;
            rotate_item(q, cosine, sine, rotated, token, row, item, direction, plan);
        } else if item < comptime!(queries + plan.items) {
            let part = item - queries;
            let angle = row + part * plan.loads;
            let cosine = cosines::<N, T>(cosine, angle, plan);
            let sine = sines::<N, T>(sine, angle, angles.direction, plan);
            let from = token * plan.width + part * plan.stride;
            let to = keys + plan.first + part * plan.stride;
            let a = Vector::<f32, N>::cast_from(shared[from]);
            if comptime!(plan.distance > 0) {
                let b = Vector::<f32, N>::cast_from(shared[from + plan.distance]);
                let first = Vector::<F, N>::cast_from(a * cosine + b * sine);
                let second = Vector::<F, N>::cast_from(b * cosine - a * sine);
                for head in 0..plan.heads {
                    let place = to + head * plan.features;
                    k[place] = first;
                    k[place + plan.distance] = second;
                }
            } else {
                let both =
                    Vector::<F, N>::cast_from(a * cosine + swapped_neighbors(a, plan) * sine);
                for head in 0..plan.heads {
                    k[to + head * plan.features] = both;
                }
            }
        } else {
            let part = item - comptime!(queries + plan.items);
            let head = part / mla.nope;
            let feature = part % mla.nope;
            let from = (token * plan.heads + head) * comptime!(mla.nope + mla.value);
            k[keys + head * plan.features + feature] = kv[from + feature];
        }
    }
}

/// Computes the gradients. For each token, some units sum the gradient of the shared part of the key over the heads in
/// order and rotate it back. The other units copy the gradients of the parts that are not shared, and fill the gradient
/// of the values with 0.
#[cube(launch_unchecked)]
pub(super) fn mla_backward_kernel<F: Float, N: Size, T: Size>(
    dk: &Tensor<Vector<F, N>>,
    cosine: &Tensor<Vector<f32, T>>,
    sine: &Tensor<Vector<f32, T>>,
    each: &ComptimeOption<OwnedTensor<i32>>,
    dkv: &mut Tensor<Vector<F, N>>,
    shared: &mut Tensor<Vector<F, N>>,
    angles: &TokenAngles,
    #[comptime] plan: RopePlan,
    #[comptime] mla: MlaDims,
    #[define(F)] _dtype: ElemType,
) {
    let features = comptime!(mla.nope + mla.value);
    let items = comptime!(plan.items + plan.heads * features);
    let unit = CUBE_POS * comptime!(UNITS as usize) + UNIT_POS as usize;
    let token = unit / items;
    if token < angles.tokens as usize {
        let item = unit % items;
        let keys = token * comptime!(plan.heads * plan.features);
        if item < plan.items {
            let row = table_row(each, token, angles, plan);
            let angle = row + item * plan.loads;
            let cosine = cosines::<N, T>(cosine, angle, plan);
            let sine = sines::<N, T>(sine, angle, angles.direction, plan);
            let from = keys + plan.first + item * plan.stride;
            let to = token * plan.width + item * plan.stride;
            let mut a = Vector::<f32, N>::new(0.0);
            let mut b = Vector::<f32, N>::new(0.0);
            for group in 0..comptime!(plan.heads / plan.group) {
                #[unroll]
                for head in 0..plan.group {
                    let place = from + (group * plan.group + head) * plan.features;
                    a += Vector::cast_from(dk[place]);
                    if comptime!(plan.distance > 0) {
                        b += Vector::cast_from(dk[place + plan.distance]);
                    }
                }
            }
            if comptime!(plan.distance > 0) {
                shared[to] = Vector::cast_from(a * cosine + b * sine);
                shared[to + plan.distance] = Vector::cast_from(b * cosine - a * sine);
            } else {
                shared[to] = Vector::cast_from(a * cosine + swapped_neighbors(a, plan) * sine);
            }
        } else {
            let part = item - plan.items;
            let head = part / features;
            let feature = part % features;
            let mut value = Vector::<F, N>::new(F::new(0.0));
            if feature < mla.nope {
                value = dk[keys + head * plan.features + feature];
            }
            dkv[token * comptime!(plan.heads * features) + part] = value;
        }
    }
}

/// Computes the queries, and the keys from `q`, `kv` and the shared part of the key. `q` is updated in place if no
/// other tensor shares its memory.
pub(in crate::rope) fn mla_forward(
    [q, kv, shared]: [CubeTensor; 3],
    angles: AngleArgs,
    heads: RotaryHeads,
    mla: MlaDims,
) -> Vec<CubeTensor> {
    let k = empty(&q, q.shape(), q.dtype);
    if q.shape().num_elements() == 0 {
        return vec![q, k];
    }
    let plan = RopePlan::new(&q.client, q.dtype, heads, &[mla.nope, mla.value]);
    let queries = if q.can_mut() {
        plan.rotated_units()
    } else {
        plan.rotated_units() + plan.unrotated_vectors()
    };
    let (rotated, output) = output_over(&q);
    let mla = in_vectors(mla, plan);
    let tokens = q.shape()[0] * q.shape()[1];
    let items = queries + plan.items + plan.heads * mla.nope;
    let (client, dtype) = (q.client.clone(), q.dtype);
    let (cosine, sine, each) = angles.tensors();
    unsafe {
        launch!(
            mla_forward_kernel,
            [client, cubes(tokens, items, UNITS), UNITS],
            [plan.vector, plan.lanes],
            [q, kv, shared, cosine, sine, each, output, &k],
            (angles.launch(tokens)),
            (plan, mla, queries, dtype_to_storage_type(dtype))
        );
    }
    vec![rotated, k]
}

/// Computes the gradient of `kv`, which is 0 for the values, and the gradient of the shared part of the key.
pub(in crate::rope) fn mla_backward(
    dk: CubeTensor,
    angles: AngleArgs,
    heads: RotaryHeads,
    mla: MlaDims,
) -> Vec<CubeTensor> {
    let (batch, seq) = (dk.shape()[0], dk.shape()[1]);
    let features = mla.nope + mla.value;
    let dkv = empty(&dk, [batch, seq, heads.heads, features], dk.dtype);
    let shared = empty(&dk, [batch, seq, heads.width], dk.dtype);
    let plan = RopePlan::new(&dk.client, dk.dtype, heads, &[mla.nope, mla.value]);
    let mla = in_vectors(mla, plan);
    let tokens = batch * seq;
    if tokens == 0 {
        return vec![dkv, shared];
    }
    let items = plan.items + plan.heads * (mla.nope + mla.value);
    let (client, dtype) = (dk.client.clone(), dk.dtype);
    let (cosine, sine, each) = angles.tensors();
    unsafe {
        launch!(
            mla_backward_kernel,
            [client, cubes(tokens, items, UNITS), UNITS],
            [plan.vector, plan.lanes],
            [dk, cosine, sine, each, &dkv, &shared],
            (angles.launch(tokens)),
            (plan, mla, dtype_to_storage_type(dtype))
        );
    }
    vec![dkv, shared]
}
