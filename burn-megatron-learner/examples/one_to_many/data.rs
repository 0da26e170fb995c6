//! The data: the model learns to reverse the features of its input.

use std::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::tensor::{Device, Tensor, TensorData};

pub const SEQ: usize = 4;
pub const HIDDEN: usize = 16;
pub const BATCH: usize = 16;

/// `[batch, SEQ, HIDDEN]`
#[derive(Clone, Debug)]
pub struct Batch {
    pub x: Tensor<3>,
    pub y: Tensor<3>,
}

#[derive(Clone)]
pub struct Reverse;

impl Batcher<usize, Batch> for Reverse {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Batch {
        let (rows, size) = (items.len(), SEQ * HIDDEN);
        let number = |item: usize, i: usize| (0.7 * (size * item + i) as f32).sin();
        let numbers = items
            .iter()
            .flat_map(|item| (0..size).map(move |i| number(*item, i)));
        let data = TensorData::new(numbers.collect::<Vec<_>>(), [rows, SEQ, HIDDEN]);
        let x = Tensor::<3>::from_data(data, device);
        Batch {
            y: x.clone().flip([2]),
            x,
        }
    }
}

pub fn loader(items: Range<usize>) -> Arc<dyn DataLoader<Batch>> {
    let builder = DataLoaderBuilder::new(Reverse).batch_size(BATCH);
    builder.build(InMemDataset::new(items.collect()))
}
