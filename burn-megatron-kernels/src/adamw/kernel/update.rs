//! The step: one vector of four elements per unit, 128 bits of each f32 buffer.

use burn::backend::TensorMetadata;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use crate::adamw::DECAY_BLOCK;
use crate::adamw::update::Numbers;
use crate::cube::specimen::{Specimen, Target, buffer, types};
use crate::cube::{RowPlan, empty, grid};

/// Units of a cube: they share nothing, so any number that fills a processor serves.
const UNITS: u32 = 256;

/// Every number of the step is an argument at run time: no step compiles anything.
#[cube(launch_unchecked)]
fn adamw_kernel<M: Float, G: Float, C: Float, N: Size>(
    master: &mut [Vector<f32, N>],
    first: &mut [Vector<M, N>],
    second: &mut [Vector<M, N>],
    gradient: &[Vector<G, N>],
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
    vectors: u32,
    #[define(M, G, C)] _dtypes: [ElemType; 3],
) {
    let at = CUBE_POS * UNITS as usize + UNIT_POS as usize;
    if at < vectors as usize {
        let g = Vector::<f32, N>::cast_from(gradient[at]) * Vector::new(scale);
        let m =
            Vector::<f32, N>::cast_from(first[at]) * Vector::new(beta1) + g * Vector::new(rest1);
        let v = Vector::<f32, N>::cast_from(second[at]) * Vector::new(beta2)
            + g * g * Vector::new(rest2);
        first[at] = Vector::cast_from(m);
        second[at] = Vector::cast_from(v);
        let below = v.sqrt() * Vector::new(root) + Vector::new(epsilon);
        let mut rate = decay;
        #[unroll]
        for i in 0..factors.len() {
            rate *= factors.index(i).as_slice()[at * N::value() / DECAY_BLOCK];
        }
        let w = master[at];
        let changed = w - (Vector::new(size) * m / below + Vector::new(rate) * w);
        master[at] = changed;
        #[unroll]
        for i in 0..model.len() {
            let copy = model.index_mut(i);
            copy.as_mut_slice()[at] = Vector::cast_from(changed);
        }
    }
}

/// See [`Update`](crate::adamw::update::Update) for the inputs.
pub(in crate::adamw) fn update(
    inputs: Vec<CubeTensor>,
    blocks: bool,
    numbers: &Numbers,
    model: Option<DType>,
) -> Vec<CubeTensor> {
    let mut inputs = inputs.into_iter();
    let mut outputs: Vec<_> = inputs.by_ref().take(3).map(own).collect();
    let gradient: Vec<_> = inputs.by_ref().take(1).collect();
    let factors: Vec<_> = inputs.take(usize::from(blocks)).collect();
    let shape = outputs[0].shape();
    let length = shape.num_elements();
    outputs.extend(model.map(|dtype| empty(&outputs[0], shape, dtype)));
    let ([master, first, second, copy @ ..], [gradient]) = (&outputs[..], &gradient[..]) else {
        unreachable!("the kernel has four inputs or five")
    };
    if length == 0 {
        return outputs;
    }
    let client = master.client.clone();
    let vector = RowPlan::new(&client, master.dtype, length).vector;
    let vectors = length / vector;
    let types = [first.dtype, gradient.dtype, model.unwrap_or(master.dtype)];
    unsafe {
        adamw_kernel::launch_unchecked(
            &client,
            grid(&client, vectors.div_ceil(UNITS as usize)),
            CubeDim::new_1d(UNITS),
            vector,
            master.clone().into_buffer_arg(),
            first.clone().into_buffer_arg(),
            second.clone().into_buffer_arg(),
            gradient.clone().into_buffer_arg(),
            factors
                .into_iter()
                .map(CubeTensor::into_tensor_arg)
                .collect(),
            copy.iter()
                .map(|copy| copy.clone().into_tensor_arg())
                .collect(),
            numbers.scale as f32,
            numbers.first[0] as f32,
            numbers.first[1] as f32,
            numbers.second[0] as f32,
            numbers.second[1] as f32,
            numbers.size as f32,
            numbers.root as f32,
            numbers.epsilon as f32,
            numbers.decay as f32,
            vectors as u32,
            types.map(dtype_to_storage_type),
        );
    }
    outputs
}

/// The tensor itself where nobody else holds its memory, a copy otherwise.
fn own(tensor: CubeTensor) -> CubeTensor {
    match tensor.can_mut() {
        true => tensor,
        false => tensor.copy(),
    }
}

/// Moments in f32 and bf16, gradients in every type, copies of the weights in the type of the
/// gradient.
pub(super) fn specimens(target: &Target) -> Vec<Specimen> {
    let [(_, single, vector), _, (_, brain, _)] = types();
    let mut all = vec![];
    for (moments, moment) in [("f32", single), ("bf16", brain)] {
        for (name, dtype, _) in types() {
            all.push(specimen(
                target,
                &format!("adamw/{name}/moments-{moments}"),
                vector,
                [moment, dtype, dtype],
            ));
        }
    }
    all
}

fn specimen(target: &Target, name: &str, vector: usize, dtypes: [ElemType; 3]) -> Specimen {
    let (device, compiler) = target.properties();
    Specimen::streaming(
        name.to_string(),
        adamw_kernel::AdamwKernel::new(
            target.settings(UNITS),
            device,
            compiler,
            buffer(),
            buffer(),
            buffer(),
            buffer(),
            [crate::cube::specimen::tensor()].into_iter().collect(),
            [crate::cube::specimen::tensor()].into_iter().collect(),
            (),
            (),
            (),
            (),
            (),
            (),
            (),
            (),
            (),
            (),
            vector,
            dtypes,
        ),
    )
}
