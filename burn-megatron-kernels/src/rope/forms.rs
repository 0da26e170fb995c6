//! The launches of this operation, each with its forms.
//!
//! After the tensors that a launch works on come cosines, sines and, where every token has its own
//! position, the positions.

use burn::backend::TensorMetadata;
use burn::backend::flex::FlexTensor;
#[cfg(feature = "cubecl")]
use burn_cubecl::tensor::CubeTensor;

use super::check::NAME;
#[cfg(feature = "cubecl")]
use super::kernel;
use super::{Heads, Latent, cpu};
use crate::cpu::for_float;
use crate::launch::{Kernel, Spec};

/// Turns `x` forth or back.
#[derive(Debug)]
pub(super) struct Turn {
    pub heads: Heads,
    /// The position of the first token where not every token has its own.
    pub start: usize,
    pub back: bool,
}

impl Kernel for Turn {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone()]
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let x = inputs.remove(0);
        for_float!(x.dtype(), E => {
            let angles = cpu::Angles::<E>::new(&inputs, x.shape()[1], self.start, self.back);
            vec![cpu::turn::<E>(x, &angles, self.heads)]
        })
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let x = inputs.remove(0);
        let angles = kernel::Angles::new(inputs, x.shape()[1], self.start, self.back);
        vec![kernel::turn(x, angles, self.heads)]
    }
}

/// `q`, `kv` and the shared key to the queries and the keys.
#[derive(Debug)]
pub(super) struct Keys {
    pub heads: Heads,
    pub latent: Latent,
    pub start: usize,
}

impl Kernel for Keys {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        vec![inputs[0].clone(); 2]
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let angles = inputs.split_off(3);
        let q = inputs.remove(0);
        for_float!(q.dtype(), E => {
            let angles = cpu::Angles::<E>::new(&angles, q.shape()[1], self.start, false);
            let k = cpu::keys::<E>(&inputs[0], &inputs[1], &angles, self.heads, self.latent);
            vec![cpu::turn::<E>(q, &angles, self.heads), k]
        })
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let angles = inputs.split_off(3);
        let angles = kernel::Angles::new(angles, inputs[0].shape()[1], self.start, false);
        kernel::keys(inputs, angles, self.heads, self.latent)
    }
}

/// The gradient of the keys to those of `kv`, 0 for the values, and of the shared key.
#[derive(Debug)]
pub(super) struct KeysBack {
    pub heads: Heads,
    pub latent: Latent,
    pub start: usize,
}

impl Kernel for KeysBack {
    fn name(&self) -> &'static str {
        NAME
    }

    fn outputs(&self, inputs: &[Spec]) -> Vec<Spec> {
        let [batch, seq] = [inputs[0].shape[0], inputs[0].shape[1]];
        let features = self.latent.nope + self.latent.value;
        let dtype = inputs[0].dtype;
        vec![
            Spec::new([batch, seq, self.heads.heads, features], dtype),
            Spec::new([batch, seq, self.heads.width], dtype),
        ]
    }

    fn cpu(&self, mut inputs: Vec<FlexTensor>) -> Vec<FlexTensor> {
        let dk = inputs.remove(0);
        for_float!(dk.dtype(), E => {
            let angles = cpu::Angles::<E>::new(&inputs, dk.shape()[1], self.start, true);
            cpu::keys_back::<E>(&dk, &angles, self.heads, self.latent)
        })
    }

    #[cfg(feature = "cubecl")]
    fn cube(&self, mut inputs: Vec<CubeTensor>) -> Vec<CubeTensor> {
        let dk = inputs.remove(0);
        let angles = kernel::Angles::new(inputs, dk.shape()[1], self.start, true);
        kernel::keys_back(dk, angles, self.heads, self.latent)
    }
}
