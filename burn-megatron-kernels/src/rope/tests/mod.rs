use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::*;
use crate::testing::{Input, devices};

mod errors;
mod mla;
mod rotation;
mod table;

fn config(width: usize, max_positions: usize) -> RopeConfig {
    RopeConfig {
        width,
        max_positions,
        base: 100.0,
        scaling: Scaling::None,
    }
}

/// Returns a table for the device and type of `x`.
fn table<const D: usize>(x: &Tensor<D>, width: usize, max_positions: usize) -> RopeTable {
    let config = config(width, max_positions);
    RopeTable::new(&config, &x.device(), x.dtype()).unwrap()
}

/// Returns the positions of tokens `[batch, seq]`, scattered over `0..max`.
fn scattered(batch: usize, seq: usize, max: usize, device: &Device) -> Positions {
    let values: Vec<i32> = (0..batch * seq).map(|i| (i * 7 % max) as i32).collect();
    let data = TensorData::new(values, [batch, seq]);
    Positions::Each(Tensor::<2, Int>::from_data(data, &device.clone().inner()))
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data()
        .convert_dtype(DType::F64)
        .try_into_vec()
        .unwrap()
}
