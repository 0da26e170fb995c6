//! Compares the forward and the backward of every collective with a simple reference. The results must be exactly
//! equal.
//!
//! Values are small integers times `2^rank`: each type represents their sums exactly, and different sets of
//! ranks have different sums.

mod coalesced;
mod device;
mod faults;
mod linear_maps;
mod packed;
mod reduce_in_f32;
mod rows;
mod started;

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::Comm;
use crate::comm::{CommError, World};

/// Runs `f` on `ranks` threads with the communicator of all ranks.
fn over<T: Send>(ranks: usize, f: impl Fn(Comm) -> T + Sync) -> Vec<T> {
    let run = |rank: crate::comm::Rank| Ok::<_, CommError>(f(rank.communicator()));
    World::threads(ranks).unwrap().run(run).unwrap()
}

/// `1 + i mod 5` times `2^rank`.
fn own(rank: usize, len: usize) -> Vec<i64> {
    (0..len).map(|i| (1 + i as i64 % 5) << rank).collect()
}

fn autodiff() -> Device {
    Device::flex().autodiff()
}

fn tensor<const D: usize>(
    values: &[i64],
    shape: [usize; D],
    device: &Device,
    dtype: DType,
) -> Tensor<D> {
    let values: Vec<f64> = values.iter().map(|x| *x as f64).collect();
    Tensor::from_data(TensorData::new(values, shape), (device, dtype))
}

fn integers<const D: usize>(tensor: Tensor<D>) -> Vec<i64> {
    let values: Vec<f64> = tensor.into_data().convert::<f64>().try_into_vec().unwrap();
    assert!(values.iter().all(|x| x.fract() == 0.0), "{values:?}");
    values.into_iter().map(|x| x as i64).collect()
}

/// Returns the output of `f`, and the result of its backward for `gradient`.
fn both_ways<const D: usize>(
    f: impl Fn(Tensor<D>) -> Tensor<D>,
    x: Tensor<D>,
    gradient: impl Fn([usize; D]) -> Tensor<D>,
) -> (Tensor<D>, Tensor<D>) {
    let x = x.require_grad();
    let y = f(x.clone());
    let gradients = (y.clone() * gradient(y.dims())).sum().backward();
    (
        y.inner(),
        x.grad(&gradients).expect("a gradient of the input"),
    )
}

fn dot(a: &[i64], b: &[i64]) -> i64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
