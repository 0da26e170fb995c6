//! Copies of modules and batches on another device.

use std::collections::HashMap;

use burn::backend::DispatchTensor;
use burn::module::{Flag, Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Bool, DType, Device, Int, Tensor};

/// A batch of data: the input of a forward in addition to the model.
///
/// The trait is implemented for tensors, and for lists and tuples of batches. For a struct of tensors, implement it by
/// copying each field:
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor};
/// use burn_megatron_verify::devices::Batch;
///
/// struct Images {
///     pixels: Tensor<4>,
///     labels: Tensor<1, Int>,
/// }
///
/// impl Batch for Images {
///     fn on(&self, device: &Device, float: Option<DType>) -> Self {
///         Self {
///             pixels: self.pixels.on(device, float),
///             labels: self.labels.on(device, float),
///         }
///     }
/// }
/// ```
pub trait Batch {
    /// Returns a copy of the batch on `device`. Float tensors are converted to the dtype `float`, or keep their dtype
    /// if `float` is `None`.
    fn on(&self, device: &Device, float: Option<DType>) -> Self;
}

impl<const D: usize> Batch for Tensor<D> {
    fn on(&self, device: &Device, float: Option<DType>) -> Self {
        let dtype = float.unwrap_or(self.dtype());
        let data = self.to_data().convert_dtype(dtype);
        Tensor::from_data(data, (device, dtype))
    }
}

impl<const D: usize> Batch for Tensor<D, Int> {
    fn on(&self, device: &Device, _: Option<DType>) -> Self {
        Tensor::from_data(self.to_data(), device)
    }
}

impl<const D: usize> Batch for Tensor<D, Bool> {
    fn on(&self, device: &Device, _: Option<DType>) -> Self {
        Tensor::from_data(self.to_data(), device)
    }
}

impl Batch for () {
    fn on(&self, _: &Device, _: Option<DType>) -> Self {}
}

impl<T: Batch> Batch for Vec<T> {
    fn on(&self, device: &Device, float: Option<DType>) -> Self {
        self.iter().map(|one| one.on(device, float)).collect()
    }
}

impl<T: Batch> Batch for Option<T> {
    fn on(&self, device: &Device, float: Option<DType>) -> Self {
        self.as_ref().map(|one| one.on(device, float))
    }
}

macro_rules! tuples {
    ($(($($name:ident $index:tt),+))+) => {
        $(impl<$($name: Batch),+> Batch for ($($name,)+) {
            fn on(&self, device: &Device, float: Option<DType>) -> Self {
                ($(self.$index.on(device, float),)+)
            }
        })+
    };
}

tuples! { (A 0) (A 0, B 1) (A 0, B 1, C 2) (A 0, B 1, C 2, E 3) }

/// Returns a copy of the module on a device without autodiff. Floats are converted to the dtype `float`, or keep their
/// dtype if it is `None`. Shared parameters stay shared.
pub(super) fn place<M: Module>(model: &M, device: &Device, float: Option<DType>) -> M {
    // `valid` creates new running states. Moving the model would change the running states of the original.
    let copy = model.valid().to_device(device).map(&mut Cast(float));
    copy.map(&mut Leaves::default())
}

/// Returns a copy of the module for training, with gradients and with the training flags of the model.
pub(super) fn place_for_training<M: Module>(model: &M, device: &Device) -> M {
    let copy = model.valid().to_device(device).train();
    copy.map(&mut Leaves {
        keeps_flags: true,
        ..Leaves::default()
    })
}

/// Returns a copy of the module in which the same parameters have gradients as in the model. Training flags are off.
pub(super) fn place_with_gradients<M: Module>(
    model: &M,
    device: &Device,
    float: Option<DType>,
) -> M {
    let copy = model.valid().to_device(device).map(&mut Cast(float));
    copy.train().map(&mut Leaves::default())
}

struct Cast(Option<DType>);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.0 {
            Some(dtype) => param.map(|tensor| tensor.cast(dtype)),
            None => param,
        }
    }
}

/// Parameters with the same ID share a tensor. Training flags are off unless they are kept.
#[derive(Default)]
struct Leaves {
    known: HashMap<ParamId, DispatchTensor>,
    keeps_flags: bool,
}

impl ModuleMapper for Leaves {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.known.get(&param.id) {
            Some(known) => param.map(|_| Tensor::from_dispatch(known.clone())),
            None => {
                self.known.insert(param.id, param.base().into_dispatch());
                param
            }
        }
    }

    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        if self.keeps_flags {
            return flag;
        }
        flag.with_value(false)
    }
}
