//! The FP8 state of a layer in the record of its module.

use std::fmt;

use burn::module::{
    Content, Devices, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper, ModuleVisitor,
    Param,
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::history::ScaleState;
use super::{Fp8Layer, Fp8LayerState, Operand};

/// With delayed scaling the FP8 state is stored as one integer parameter `[3, 1 + history]`. Its rows belong to the
/// input, the weight and the gradient. Each row holds the bits of the scale and of the magnitudes, newest first.
/// Optimizers and data parallelism ignore this parameter, because it holds no floats.
///
/// To load a record without the state, such as a model that was not trained in FP8, use
/// [`allow_partial`](burn::store::ModuleRecord::allow_partial). To load a record with the state into a model without
/// the state, use [`allow_unused`](burn::store::ModuleRecord::allow_unused).
impl Module for Fp8Layer {
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        if let Some(state) = self.to_tensor() {
            visitor.visit_int(&Param::initialized(self.shared.id, state));
        }
    }

    fn map<M: ModuleMapper>(self, mapper: &mut M) -> Self {
        if let Some(state) = self.to_tensor() {
            let mapped = mapper.map_int(Param::initialized(self.shared.id, state.clone()));
            let (_, mapped, _) = mapped.consume();
            if let Err(error) = self.take_tensor(mapped) {
                // A mapper cannot return an error, so the layer keeps its state.
                tracing::error!("{}: {error}", self.path());
            }
        }
        self
    }

    fn to_device(self, _device: &Device) -> Self {
        self
    }

    fn fork(self, _device: &Device) -> Self {
        self
    }

    fn collect_devices(&self, devices: Devices) -> Devices {
        devices
    }

    fn materialize(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn train(self) -> Self {
        self
    }
}

impl Fp8Layer {
    /// Returns the state of the layer, if it has one.
    fn to_tensor(&self) -> Option<Tensor<2, Int>> {
        let state = self.delayed_state()?;
        let rows = Operand::ALL.map(|operand| state.of(operand).clone());
        let width = 1 + rows[0].history.len();
        let bits = |state: ScaleState| std::iter::once(state.scale).chain(state.history);
        let bits: Vec<i32> = rows
            .into_iter()
            .flat_map(bits)
            .map(|bits| bits as i32)
            .collect();
        let data = TensorData::new(bits, [Operand::ALL.len(), width]);
        Some(Tensor::from_data(data, (&Device::flex(), DType::I32)))
    }

    fn take_tensor(&self, state: Tensor<2, Int>) -> Result<(), super::Fp8Error> {
        let width = state.dims()[1];
        let bits = state.into_data();
        let bits: Vec<u32> = bits.iter::<i64>().map(|bits| bits as u32).collect();
        let mut rows = bits.chunks(width).map(|row| ScaleState {
            scale: row[0],
            history: row[1..].to_vec(),
        });
        match [rows.next(), rows.next(), rows.next()] {
            [Some(input), Some(weight), Some(gradient)] => self.restore(&Fp8LayerState {
                input,
                weight,
                gradient,
            }),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Fp8Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl ModuleDisplayDefault for Fp8Layer {
    fn content(&self, content: Content) -> Option<Content> {
        content.add_formatted(self).optional()
    }
}

impl ModuleDisplay for Fp8Layer {}
